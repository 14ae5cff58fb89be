import torch
import torch.nn as nn
import torch.nn.functional as F


class TextClassifier(nn.Module):
    def __init__(self, vocab=100, d=48):
        super().__init__()
        self.emb = nn.Embedding(vocab, d, padding_idx=0)
        self.pos = nn.Parameter(torch.randn(40, d) * 0.02)
        self.drop = nn.Dropout(0.3)
        layer = nn.TransformerEncoderLayer(d, 4, 96, dropout=0.3, batch_first=True)
        self.enc = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Sequential(nn.Dropout(0.5), nn.Linear(d, 4))

    def forward(self, input_ids, attention_mask):
        x = self.drop(self.emb(input_ids) + self.pos[: input_ids.size(1)])
        h = self.enc(x, src_key_padding_mask=attention_mask == 0)
        m = attention_mask.unsqueeze(-1).float()
        h = torch.where(m.bool(), h, torch.zeros_like(h))
        return self.out(h.sum(1) / m.sum(1))


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = TextClassifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    g = torch.Generator().manual_seed(61)
    mask = (torch.arange(20)[None] < torch.tensor([20, 8, 14, 11, 17, 6])[:, None]).long()
    batch = dict(input_ids=torch.randint(1, 100, (6, 20), generator=g) * mask, attention_mask=mask,
                 labels=torch.randint(0, 4, (6,), generator=g))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["input_ids"], batch["attention_mask"]), batch["labels"])

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
