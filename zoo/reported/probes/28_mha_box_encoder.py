import torch
import torch.nn as nn
import torch.nn.functional as F


class BoxEncoder(nn.Module):
    def __init__(self, batch_first, d=48):
        super().__init__()
        self.inp = nn.Linear(12, d)
        self.attn = nn.MultiheadAttention(d, 4, dropout=0.0, batch_first=batch_first)
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.ffn = nn.Sequential(nn.Linear(d, 96), nn.ReLU(), nn.Linear(96, d))
        self.cls = nn.Linear(d, 6)

    def forward(self, boxes):
        x = self.inp(boxes)
        a, _ = self.attn(x, x, x, need_weights=False)
        x = self.norm1(x + a)
        x = self.norm2(x + self.ffn(x))
        return self.cls(x)


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = BoxEncoder(batch_first=fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    g = torch.Generator().manual_seed(28)
    batch = dict(boxes=torch.randn(5, 11, 12, generator=g), labels=torch.randint(0, 6, (5, 11), generator=g))

    def loss_fn(model, batch):
        return F.cross_entropy(model(batch["boxes"]).transpose(1, 2), batch["labels"])

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
