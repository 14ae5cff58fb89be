import copy
import torch
import torch.nn as nn
import torch.nn.functional as F


class BYOL(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(20, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 32))
        self.target = copy.deepcopy(self.online).requires_grad_(False)
        self.predictor = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("feature_mean", torch.zeros(32))

    def forward(self, a, b):
        p = F.normalize(self.predictor(self.online(a)), dim=1)
        with torch.no_grad():
            t = self.target(b) - self.feature_mean
            if self.training:
                self.steps += 1
                tau = min(0.99, float(self.steps) / (10 + float(self.steps)))
                for o, m in zip(self.online.parameters(), self.target.parameters()):
                    m.lerp_(o, 1 - tau)
                self.feature_mean.lerp_((t + self.feature_mean).mean(0), 0.1)
        return (2 - 2 * (p * F.normalize(t, dim=1)).sum(1)).mean()


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = BYOL()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    g = torch.Generator().manual_seed(62)
    x = torch.randn(16, 20, generator=g)
    batch = dict(a=x + 0.1 * torch.randn(x.shape, generator=g), b=x + 0.1 * torch.randn(x.shape, generator=g))

    def loss_fn(model, batch):
        return model(batch["a"], batch["b"])

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
