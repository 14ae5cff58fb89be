import torch
import torch.nn as nn
import torch.nn.functional as F


class TabularEncoder(nn.Module):
    def __init__(self, batch_first, cols=7, vocab=30, d=40):
        super().__init__()
        self.emb = nn.Embedding(vocab * cols, d)
        self.register_buffer("offset", torch.arange(cols) * vocab)
        layer = nn.TransformerEncoderLayer(d, 4, 80, dropout=0.1, activation="gelu", batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(d * cols, 4)

    def forward(self, rows):
        h = self.encoder(self.emb(rows + self.offset))
        return self.out(h.flatten(1))


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = TabularEncoder(batch_first=fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    g = torch.Generator().manual_seed(29)
    batch = dict(rows=torch.randint(0, 30, (10, 7), generator=g), labels=torch.randint(0, 4, (10,), generator=g))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["rows"]), batch["labels"])

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
