import torch
import torch.nn as nn
import torch.nn.functional as F


class SimCLR(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(),
                               nn.Conv2d(16, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
                               nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.g = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, x):
        return F.normalize(self.g(self.f(x)), dim=1)


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = SimCLR()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    g = torch.Generator().manual_seed(55)
    x = torch.rand(12, 3, 16, 16, generator=g)
    batch = dict(view_a=x + 0.05 * torch.randn(x.shape, generator=g), view_b=x.flip(-1) + 0.05 * torch.randn(x.shape, generator=g))

    def loss_fn(model, batch):
        n = batch["view_a"].size(0)
        z = model(torch.cat([batch["view_a"], batch["view_b"]]))
        sim = (z @ z.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
        target = torch.arange(2 * n).roll(n)
        return F.cross_entropy(sim, target)

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
