"""RGB-D saliency network with a depth branch: the prediction is [B, 1, H, W], the depth map [B, H, W]. smooth_l1_loss broadcasts to [B, B, H, W].

Source: https://github.com/jiwei0921/CoNet/issues/3 https://github.com/pytorch/pytorch/issues/19699
True cause: loss broadcast
Where: loss_fn (smooth_l1_loss)
Fix: depth.unsqueeze(1)
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)


def block(i, o, stride=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1), nn.BatchNorm2d(o), nn.ReLU(inplace=True))


class DepthNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = block(3, 16), block(16, 24, 2)
        self.mid = block(24, 24)
        self.up = block(40, 16)
        self.out = nn.Conv2d(16, 1, 1)

    def forward(self, x):
        a = self.down1(x)
        b = self.mid(self.down2(a))
        b = F.interpolate(b, scale_factor=2, mode="nearest")
        return self.out(self.up(torch.cat([a, b], 1)))


def make_pair(n=8, s=16):
    level = torch.rand(n, 1, 1) * 2 - 1
    slope = torch.linspace(-1, 1, s)[None, None, :] * torch.randn(n, 1, 1)
    depth = level + slope * 0.7
    rgb = torch.stack([depth, depth.flip(-1), -depth], 1) + 0.1 * torch.randn(n, 3, s, s)
    return rgb, depth.expand(n, s, s).contiguous()


def build(fixed=False):
    torch.manual_seed(1)
    net = DepthNet()
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    batches = [make_pair() for _ in range(80)]

    def loss_fn(model, batch):
        img, depth = batch
        pred = model(img)
        if fixed:
            depth = depth.unsqueeze(1)
        return F.smooth_l1_loss(pred, depth)

    return dict(model=net, optimizer=optimizer, batches=batches, loss_fn=loss_fn)
