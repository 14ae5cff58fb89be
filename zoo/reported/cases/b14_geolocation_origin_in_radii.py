"""Geolocation regression in kilometres: the learned map origin is stored in Earth radii, so its gradient is 6371 times that of anything else. It has a tiny rate of its own, but the global clip at 1.0 scales all other gradients to nothing.

Source: https://github.com/google/automl/issues/910 https://github.com/clab/dynet/issues/1374
True cause: one parameter's gradient eats the global norm
Where: origin
Fix: store the origin in kilometres (or clip per group)
"""
import torch
from torch import nn

torch.set_num_threads(1)
EARTH_RADIUS = 6371.0


class Geolocator(nn.Module):
    def __init__(self, unit):
        super().__init__()
        self.unit = unit
        self.encoder = nn.Sequential(nn.Linear(24, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.head = nn.Linear(64, 2)
        self.origin = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return self.head(self.encoder(x)) + self.origin * self.unit


def build(fixed=False):
    torch.manual_seed(6)
    model = Geolocator(1.0 if fixed else EARTH_RADIUS)
    net = [p for n, p in model.named_parameters() if n != "origin"]
    opt = torch.optim.SGD([dict(params=net, lr=0.05), dict(params=[model.origin], lr=0.05 if fixed else 1e-9)], momentum=0.9)
    w = torch.randn(24, 2) / 24**0.5
    batches = []
    for _ in range(110):
        x = torch.randn(48, 24)
        batches.append((x, 2 * torch.sin(x @ w * 1.5) + torch.tensor([0.7, -0.4])))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: ((m(b[0]) - b[1]) ** 2).mean(), max_grad_norm=1.0)
