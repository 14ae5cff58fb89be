"""HEALTHY: SimCLR-like training with warm-up: for the first third of the run the loss stays at ln(batch), then it falls.

Source: https://github.com/HobbitLong/SupContrast/issues/3
True cause: none
Where: none
Fix: none
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.Linear(48, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU())
        self.g = nn.Linear(128, 32)

    def forward(self, x):
        return F.normalize(self.g(self.f(x)), dim=1)


def build(fixed=False, temperature=0.5):
    torch.manual_seed(0)
    model = Encoder()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, 1e-4 + (s / 60) ** 4))
    mix = torch.randn(6, 48)
    batches = []
    for _ in range(120):
        z = torch.randn(64, 6) @ mix * 0.35 + 4.0
        batches.append((z + 0.6 * torch.randn(64, 48), z + 0.6 * torch.randn(64, 48)))

    def loss_fn(m, b):
        a, c = m(b[0]), m(b[1])
        return F.cross_entropy(a @ c.T / temperature, torch.arange(len(a)))

    return dict(model=model, optimizer=opt, scheduler=sched, batches=batches, loss_fn=loss_fn)
