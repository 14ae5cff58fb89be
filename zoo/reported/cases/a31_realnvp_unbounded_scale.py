"""RealNVP with an unbounded log-scale in the affine coupling: for one outlier exp(s) overflows.

Source: https://github.com/VincentStimper/normalizing-flows/issues/47 https://github.com/rosinality/glow-pytorch/issues/25
True cause: the exponential of a log-scale above 88
Where: layers.* (exp)
Fix: bound s with tanh before exp, and standardise the row that came in raw units
"""
import math

import torch
from torch import nn

torch.set_num_threads(1)


class Coupling(nn.Module):
    def __init__(self, dim, flip, bound):
        super().__init__()
        self.flip, self.bound = flip, bound
        self.net = nn.Sequential(nn.Linear(dim // 2, 48), nn.ReLU(), nn.Linear(48, dim))

    def forward(self, x):
        a, b = x.chunk(2, -1)
        if self.flip:
            a, b = b, a
        s, t = self.net(a).chunk(2, -1)
        if self.bound:
            s = 2 * torch.tanh(s / 2)
        b = b * torch.exp(s) + t
        return torch.cat([b, a] if self.flip else [a, b], -1), s.sum(-1)


class RealNVP(nn.Module):
    def __init__(self, bound):
        super().__init__()
        self.layers = nn.ModuleList(Coupling(6, k % 2 == 1, bound) for k in range(4))

    def forward(self, x):
        log_det = 0
        for layer in self.layers:
            x, d = layer(x)
            log_det = log_det + d
        return x, log_det


def build(fixed=False):
    torch.manual_seed(31)
    model = RealNVP(fixed)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    batches = []
    for i in range(45):
        x = torch.randn(16, 6)
        x[:, 3:] = 0.5 * x[:, :3] + 0.3 * x[:, 3:]
        if i == 16 and not fixed:
            x[3] = 1500 * x[3].sign()
        batches.append(x)

    def loss_fn(m, x):
        z, log_det = m(x)
        return (0.5 * z.pow(2).sum(-1) + 3 * math.log(2 * math.pi) - log_det).mean()

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn, max_grad_norm=5.0)
