"""Lane detection: the exist head ends in a sigmoid and is trained with BCEWithLogitsLoss, so the lowest score the loss sees is 0.5.

Source: https://github.com/Turoad/lanedet/issues/32 https://github.com/itakurah/focal-loss-pytorch/pull/5 https://github.com/cvg/glue-factory/issues/89
True cause: sigmoid twice
Where: exist_head / loss_fn (binary_cross_entropy_with_logits of values within [0, 1])
Fix: drop the sigmoid in the head while training
"""
import torch
from torch import nn

torch.set_num_threads(1)


class ExistHead(nn.Module):
    def __init__(self, channels, lanes, act):
        super().__init__()
        self.conv = nn.Conv2d(channels, 6, 1)
        self.pool = nn.AvgPool2d(2)
        self.fc9 = nn.Linear(6 * 4 * 8, 64)
        self.fc10 = nn.Linear(64, lanes)
        self.act = nn.Sigmoid() if act else nn.Identity()

    def forward(self, x):
        x = self.pool(self.conv(x)).flatten(1)
        return self.act(self.fc10(torch.relu(self.fc9(x))))


class Detector(nn.Module):
    def __init__(self, act):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, 1, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.exist_head = ExistHead(16, 4, act)

    def forward(self, img):
        return self.exist_head(self.backbone(img))


def build(fixed=False):
    torch.manual_seed(5)
    model = Detector(act=not fixed)
    exist_loss = nn.BCEWithLogitsLoss()
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    batches = []
    for _ in range(90):
        exist = (torch.rand(16, 4) < 0.3).float()
        img = 0.3 * torch.randn(16, 3, 16, 32)
        for lane in range(4):
            img[:, :, :, 4 + 8 * lane] += 1.5 * exist[:, lane, None, None]
        batches.append(dict(img=img, exist=exist))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: exist_loss(m(b["img"]), b["exist"]))
