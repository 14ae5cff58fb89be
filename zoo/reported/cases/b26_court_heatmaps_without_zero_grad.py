"""Key-point heat maps of a tennis court, SGD with momentum, no zero_grad in the trainer: the loss falls for some steps, then the summed gradients push the output into saturation and it stays at the variance of the maps.

Source: https://github.com/yastrebksv/TennisCourtDetector/issues/7 https://github.com/facebookresearch/nwm/issues/16
True cause: .grad is never cleared
Where: the loop
Fix: optimizer.zero_grad()
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)


def conv(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.ReLU(), nn.BatchNorm2d(o))


class TrackNet(nn.Module):
    def __init__(self, points=4):
        super().__init__()
        self.enc1, self.enc2 = conv(3, 16), conv(16, 24)
        self.dec = conv(24, 16)
        self.out = nn.Conv2d(16, points, 1)

    def forward(self, x):
        x = F.max_pool2d(self.enc1(x), 2)
        x = F.interpolate(self.enc2(x), scale_factor=2)
        return torch.sigmoid(self.out(self.dec(x)))


def sample(n=6, s=16, k=4):
    yy, xx = torch.meshgrid(torch.arange(s), torch.arange(s), indexing="ij")
    pts = torch.rand(n, k, 2) * s
    heat = torch.exp(-((xx - pts[..., 0, None, None]) ** 2 + (yy - pts[..., 1, None, None]) ** 2) / 8.0)
    img = torch.stack([heat[:, 0] + heat[:, 3], heat[:, 1] - heat[:, 3], heat[:, 2]], 1) + 0.05 * torch.randn(n, 3, s, s)
    return img, heat


def build(fixed=False):
    torch.manual_seed(2)
    model = TrackNet()
    opt = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    batches = [sample() for _ in range(100)]
    return dict(model=model, optimizer=opt, batches=batches, zero_grad=fixed, loss_fn=lambda m, b: F.mse_loss(m(b[0]), b[1]))
