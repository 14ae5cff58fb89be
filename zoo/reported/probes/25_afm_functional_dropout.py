import torch
import torch.nn as nn
import torch.nn.functional as F


class AttentionalFM(nn.Module):
    def __init__(self, follow_mode, fields=6, vocab=40, d=16):
        super().__init__()
        self.emb = nn.Embedding(fields * vocab, d)
        self.register_buffer("offset", torch.arange(fields) * vocab)
        self.lin = nn.Embedding(fields * vocab, 1)
        self.att, self.score, self.fc = nn.Linear(d, 16), nn.Linear(16, 1), nn.Linear(d, 1)
        self.follow_mode = follow_mode

    def drop(self, x, p):
        if self.follow_mode:
            return F.dropout(x, p=p, training=self.training)
        return F.dropout(x, p=p)

    def forward(self, x):
        idx = x + self.offset
        e = self.emb(idx)
        i, j = torch.triu_indices(e.size(1), e.size(1), 1)
        inner = e[:, i] * e[:, j]
        w = F.softmax(self.score(F.relu(self.att(inner))), dim=1)
        w = self.drop(w, 0.2)
        out = self.drop((w * inner).sum(1), 0.2)
        return (self.fc(out) + self.lin(idx).sum(1)).squeeze(1)


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = AttentionalFM(follow_mode=fixed)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-6)
    g = torch.Generator().manual_seed(25)
    batch = dict(features=torch.randint(0, 40, (32, 6), generator=g), click=torch.randint(0, 2, (32,), generator=g).float())

    def loss_fn(model, batch):
        return F.binary_cross_entropy_with_logits(model(batch["features"]), batch["click"])

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
