"""HEALTHY: deep image prior: one image per batch for ever, BatchNorm2d over its pixels (which is instance norm), and a batch-of-one GroupNorm head.

Source: https://github.com/DmitryUlyanov/deep-image-prior/issues/27
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


def build(fixed=False):
    torch.manual_seed(37)
    model = nn.Sequential(nn.Conv2d(8, 24, 3, padding=1), nn.BatchNorm2d(24), nn.LeakyReLU(0.2), nn.Conv2d(24, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.LeakyReLU(0.2),
                          nn.Upsample(scale_factor=2), nn.Conv2d(24, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.LeakyReLU(0.2), nn.Conv2d(16, 3, 1), nn.Sigmoid())
    opt = torch.optim.Adam(model.parameters(), 5e-3)
    z = 0.1 * torch.rand(1, 8, 16, 16)
    image = F.interpolate(torch.rand(1, 3, 4, 4), scale_factor=4, mode="bilinear")
    noisy = image + 0.05 * torch.randn_like(image)
    batches = [(z + 0.01 * torch.randn_like(z), noisy) for _ in range(70)]
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: F.mse_loss(m(b[0]), b[1]))
