"""Random gamma (x ** g) on images in [0, 1]; one image was resized with a bicubic filter and overshoots below 0.

Source: https://github.com/TorchIO-project/torchio/issues/306 https://github.com/pytorch/pytorch/issues/75405
True cause: a fractional power of a negative number
Where: gamma (pow)
Fix: sign(x) * |x| ** g, or clamp
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


class RandomGamma(nn.Module):
    def __init__(self, signed):
        super().__init__()
        self.signed = signed

    def forward(self, x):
        g = torch.empty(len(x), 1, 1, 1).uniform_(0.7, 1.4)
        return x.sign() * (x.abs() + 1e-6) ** g if self.signed else x**g


class Net(nn.Module):
    def __init__(self, signed):
        super().__init__()
        self.gamma = RandomGamma(signed)
        self.stem = nn.Sequential(nn.Conv2d(1, 12, 3, 2, 1), nn.GroupNorm(3, 12), nn.SiLU(), nn.Conv2d(12, 24, 3, 2, 1), nn.GroupNorm(3, 24), nn.SiLU())
        self.fc = nn.Linear(24, 5)

    def forward(self, x):
        return self.fc(self.stem(self.gamma(x)).mean((2, 3)))


def build(fixed=False):
    torch.manual_seed(11)
    model = Net(fixed)
    opt = torch.optim.AdamW(model.parameters(), 2e-3)
    batches = []
    for i in range(40):
        y = torch.randint(0, 5, (8,))
        x = (torch.rand(8, 1, 20, 20) * 0.5 + y[:, None, None, None] * 0.1).clamp(0.01, 1)
        if i == 8:
            small = (torch.rand(1, 1, 5, 5) > 0.5).float()
            x[5] = F.interpolate(small, size=(20, 20), mode="bicubic")[0]
        batches.append((x, y))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]), max_grad_norm=1.0)
