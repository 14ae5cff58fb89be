"""DeepLab's ASPP pools the image to 1 x 1 and normalises it; 81 images with a batch size of 4 leave a last batch of one.

Source: https://github.com/jfzhang95/pytorch-deeplab-xception/issues/41 https://github.com/YudeWang/deeplabv3plus-pytorch/issues/34
True cause: batch norm over a single value per channel
Where: aspp.pool (BatchNorm2d after AdaptiveAvgPool2d(1))
Fix: drop_last=True
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


def cbr(i, o, k, d=1):
    return nn.Sequential(nn.Conv2d(i, o, k, padding=d * (k // 2), dilation=d, bias=False), nn.BatchNorm2d(o), nn.ReLU())


class ASPP(nn.Module):
    def __init__(self, c, o):
        super().__init__()
        self.branches = nn.ModuleList([cbr(c, o, 1), cbr(c, o, 3, 2), cbr(c, o, 3, 4)])
        self.pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, o, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU())
        self.project = cbr(4 * o, o, 1)

    def forward(self, x):
        g = F.interpolate(self.pool(x), x.shape[-2:])
        return self.project(torch.cat([b(x) for b in self.branches] + [g], 1))


class DeepLab(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(cbr(3, 12, 3), nn.MaxPool2d(2), cbr(12, 16, 3))
        self.aspp, self.classifier = ASPP(16, 12), nn.Conv2d(12, 2, 1)

    def forward(self, x):
        return F.interpolate(self.classifier(self.aspp(self.backbone(x))), x.shape[-2:])


def build(fixed=False):
    torch.manual_seed(6)
    model = DeepLab()
    opt = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4)
    y = F.interpolate(torch.randint(0, 2, (81, 1, 4, 4)).float(), scale_factor=4)[:, 0].long()
    x = y[:, None].float() - 0.5 + 0.5 * torch.randn(81, 3, 16, 16)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4, drop_last=fixed)
    return dict(model=model, optimizer=opt, batches=list(loader), loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
