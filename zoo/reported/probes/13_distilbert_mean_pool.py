import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import DistilBertConfig, DistilBertModel


class SentenceClassifier(nn.Module):
    def __init__(self, masked):
        super().__init__()
        self.backbone = DistilBertModel(DistilBertConfig(vocab_size=150, dim=64, hidden_dim=128, n_layers=2, n_heads=4,
                                                         max_position_embeddings=64))
        self.head = nn.Linear(64, 3)
        self.masked = masked

    def forward(self, input_ids, attention_mask):
        h = self.backbone(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        if self.masked:
            m = attention_mask.unsqueeze(-1).to(h.dtype)
            pooled = (h * m).sum(1) / m.sum(1).clamp(min=1)
        else:
            pooled = h.mean(dim=1)
        return self.head(pooled)


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = SentenceClassifier(masked=fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.01)
    g = torch.Generator().manual_seed(13)
    ids = torch.randint(5, 150, (6, 18), generator=g)
    mask = (torch.arange(18)[None] < torch.tensor([18, 7, 11, 15, 5, 9])[:, None]).long()
    ids = ids * mask
    batch = dict(input_ids=ids, attention_mask=mask, labels=torch.randint(0, 3, (6,), generator=g))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["input_ids"], batch["attention_mask"]), batch["labels"])

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
