"""A U-Net with three classes; one mask file is stored as grey levels instead of class indices: "Target 192 is out of bounds".

Source: https://github.com/milesial/Pytorch-UNet/issues/291 https://github.com/open-mmlab/mmsegmentation/issues/3609
True cause: a class label beyond the number of classes
Where: loss_fn (cross_entropy)
Fix: convert the mask to class indices
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


def double(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(), nn.Conv2d(o, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())


class UNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.inc, self.down, self.up = double(1, 8), double(8, 16), nn.ConvTranspose2d(16, 8, 2, 2)
        self.dec, self.outc = double(16, 8), nn.Conv2d(8, classes, 1)

    def forward(self, x):
        a = self.inc(x)
        b = self.down(F.max_pool2d(a, 2))
        return self.outc(self.dec(torch.cat([a, self.up(b)], 1)))


def build(fixed=False):
    torch.manual_seed(2)
    model = UNet(3)
    opt = torch.optim.RMSprop(model.parameters(), 1e-3)
    batches = []
    for i in range(24):
        y = torch.randint(0, 3, (6, 1, 4, 4)).float()
        mask = F.interpolate(y, scale_factor=4)[:, 0].long()
        x = mask[:, None].float() - 1 + 0.3 * torch.randn(6, 1, 16, 16)
        if i == 6 and not fixed:
            mask[1] = mask[1] * 96
        batches.append((x, mask))

    def loss_fn(m, b):
        return F.cross_entropy(m(b[0]), b[1])

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn)
