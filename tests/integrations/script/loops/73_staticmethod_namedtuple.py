# again: yes
# step: 5
# kind: nonfinite-loss
# cause: zero-denominator
# sample: 1
# line: iou = inter / union
# source: static training step with namedtuple outputs and an IoU loss
import sys
from typing import NamedTuple
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Pred(NamedTuple):
    length: torch.Tensor
    score: torch.Tensor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 2, bias=False)

    def forward(self, x):
        o = self.fc(x)
        return Pred(length=o[:, 0].abs(), score=o[:, 1])


class Engine:
    @staticmethod
    def training_step(model, optimizer, x, gt):
        length, score = model(x)
        inter = torch.minimum(length, gt)
        union = torch.maximum(length, gt)
        iou = inter / union
        loss = (1 - iou).mean() + 0.01 * score.pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.detach()


model = Model()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(8):
    x, gt = torch.randn(8, 4), torch.rand(8) + 0.1
    if BAD and step == 5:
        x[1] = 0.0
        gt[1] = 0.0
    Engine.training_step(model, optimizer, x, gt)
