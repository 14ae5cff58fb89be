import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import CLIPConfig, CLIPModel


class MemeClassifier(nn.Module):
    def __init__(self, right):
        super().__init__()
        cfg = CLIPConfig(
            text_config=dict(vocab_size=99, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                             max_position_embeddings=24, eos_token_id=98, bos_token_id=97, pad_token_id=1),
            vision_config=dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
                               image_size=16, patch_size=8),
            projection_dim=24)
        self.clip = CLIPModel(cfg)
        self.fc = nn.Linear(48, 3)
        self.right = right

    def forward(self, pixel_values, input_ids, attention_mask):
        out = self.clip(pixel_values=pixel_values, input_ids=input_ids, attention_mask=attention_mask)
        img, txt = out.image_embeds, out.text_embeds
        joint = torch.cat([img, txt], -1) if self.right else torch.cat([txt, txt], -1)
        return self.fc(joint)


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = MemeClassifier(right=fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    g = torch.Generator().manual_seed(32)
    ids = torch.randint(2, 97, (5, 12), generator=g)
    ids[:, 0], ids[:, -1] = 97, 98
    batch = dict(pixel_values=torch.randn(5, 3, 16, 16, generator=g), input_ids=ids, attention_mask=torch.ones_like(ids),
                 labels=torch.randint(0, 3, (5,), generator=g))

    def loss_fn(model, batch):
        logits = model(batch["pixel_values"], batch["input_ids"], batch["attention_mask"])
        return F.cross_entropy(logits, batch["labels"])

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
