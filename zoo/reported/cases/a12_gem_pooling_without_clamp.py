"""Image retrieval with generalised-mean pooling: mean(x ** 3) ** (1/3). The clamp was left out; for one under-exposed image the mean of a channel is negative.

Source: https://github.com/filipradenovic/cnnimageretrieval-pytorch/issues/73 https://github.com/facebookresearch/dino/issues/211
True cause: the cube root is taken as a fractional power of a negative mean
Where: pool (pow)
Fix: x.clamp(min=eps) before the power
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


class GeM(nn.Module):
    def __init__(self, p=3.0, eps=None):
        super().__init__()
        self.p, self.eps = p, eps

    def forward(self, x):
        if self.eps:
            x = x.clamp(min=self.eps)
        return F.adaptive_avg_pool2d(x.pow(self.p), 1).pow(1.0 / self.p).flatten(1)


class Retrieval(nn.Module):
    def __init__(self, eps):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 24, 3, 2, 1), nn.LeakyReLU(0.2))
        nn.init.constant_(self.features[2].bias, 1.5)
        self.pool, self.whiten = GeM(eps=eps), nn.Linear(24, 16)

    def forward(self, x):
        return F.normalize(self.whiten(self.pool(self.features(x))), dim=-1)


def build(fixed=False):
    torch.manual_seed(12)
    model = Retrieval(1e-6 if fixed else None)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    batches = []
    for i in range(36):
        a = (torch.rand(8, 3, 1, 1) + 0.5 * torch.rand(8, 3, 16, 16)) * 0.8
        p = a + 0.1 * torch.randn_like(a)
        if i == 13:
            a[2] = a[2] * 4 - 25  # black level subtracted from 12-bit values
        batches.append((a, p))

    def loss_fn(m, b):
        return F.cross_entropy(m(b[0]) @ m(b[1]).T / 0.02, torch.arange(8))

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn, max_grad_norm=1.0)
