"""Detection-style training with a warm-up that multiplies the rate by its factor at every step instead of interpolating towards the full rate: 1e-3 becomes 1e-22 and stays there.

Source: https://github.com/potterhsu/easy-faster-rcnn.pytorch/issues/26 https://github.com/facebookresearch/ParlAI/pull/1812
True cause: the warm-up factor compounds
Where: optimizer.param_groups[*]['lr']
Fix: interpolate between factor and 1
"""
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, MultiplicativeLR

torch.set_num_threads(1)


class BoxRegressor(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.Flatten())
        self.box = nn.Linear(32 * 16, 4)
        self.cls = nn.Linear(32 * 16, 2)

    def forward(self, x):
        f = self.features(x)
        return self.box(f), self.cls(f)


def scene(n=16):
    img = 0.1 * torch.randn(n, 1, 16, 16)
    boxes, labels = torch.zeros(n, 4), torch.randint(0, 2, (n,))
    for i in range(n):
        x, y = torch.randint(0, 10, (2,)).tolist()
        img[i, 0, y : y + 5, x : x + 5] += 1.0 + labels[i]
        boxes[i] = torch.tensor([x, y, x + 5, y + 5]) / 16
    return img, boxes, labels


def build(fixed=False, factor=1 / 3, warmup=40):
    torch.manual_seed(4)
    model = BoxRegressor()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if fixed:
        sched = LambdaLR(opt, lambda s: 1.0 if s >= warmup else factor * (1 - s / warmup) + s / warmup)
    else:
        sched = MultiplicativeLR(opt, lambda s: factor if s <= warmup else 1.0)
    batches = [scene() for _ in range(100)]

    def loss_fn(m, b):
        box, cls = m(b[0])
        return nn.functional.smooth_l1_loss(box, b[1]) * 5 + nn.functional.cross_entropy(cls, b[2])

    return dict(model=model, optimizer=opt, scheduler=sched, batches=batches, loss_fn=loss_fn)
