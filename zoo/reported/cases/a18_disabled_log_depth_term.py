"""Depth estimation with L1 and a log-depth term that an ablation switched off with weight 0.0; one depth map has holes (depth 0), log(0) * 0 is NaN.

Source: https://github.com/bigscience-workshop/metadata/pull/193 https://github.com/THUDM/slime/pull/2258
True cause: an infinite term with weight 0
Where: loss_fn (0.0 * log term)
Fix: do not compute a term whose weight is 0
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


class DepthNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.GELU(), nn.Conv2d(16, 24, 3, 2, 1), nn.GELU())
        self.dec = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(24, 16, 3, padding=1), nn.GELU(), nn.Upsample(scale_factor=2), nn.Conv2d(16, 1, 3, padding=1))

    def forward(self, x):
        return F.softplus(self.dec(self.enc(x)))


def build(fixed=False):
    torch.manual_seed(18)
    model = DepthNet()
    opt = torch.optim.AdamW(model.parameters(), 1e-3)
    weights = dict(l1=1.0, log=0.0, smooth=0.1)
    batches = []
    for i in range(30):
        d = F.interpolate(0.5 + 3 * torch.rand(6, 1, 4, 4), scale_factor=4, mode="bilinear")
        x = torch.cat([d, 1 / d, d.sqrt()], 1) + 0.05 * torch.randn(6, 3, 16, 16)
        if i == 10:
            d[3, :, 4:7, 9:12] = 0.0
        batches.append((x, d))

    def loss_fn(m, b):
        p = m(b[0])
        terms = dict(l1=(p - b[1]).abs().mean(), log=(p.log() - b[1].log()).abs().mean(), smooth=(p[..., 1:] - p[..., :-1]).abs().mean())
        return sum(weights[k] * terms[k] for k in terms if weights[k] or not fixed)

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn)
