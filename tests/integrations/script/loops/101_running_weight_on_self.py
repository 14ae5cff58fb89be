# again: no
# stops: self.scale = 0.9 * self.scale + 0.1 * aux.detach()
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 3
# source: auxiliary loss divided by its own running average
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Balanced:
    def __init__(self):
        self.net = nn.Linear(4, 3)
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.01)
        self.scale = torch.tensor(1.0)

    def step(self, x, y, v):
        out = self.net(x)
        ce = F.cross_entropy(out, y)
        aux = F.mse_loss(out[:, 0], v)
        self.scale = 0.9 * self.scale + 0.1 * aux.detach()
        loss = ce + aux / (self.scale.nan_to_num(1.0) + 1e-6)
        self.scale = self.scale.nan_to_num(1.0)
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()


trainer = Balanced()
for i in range(8):
    x, y, v = torch.randn(8, 4), torch.randint(0, 3, (8,)), torch.randn(8)
    if BAD and i == 5:
        v[3] = float("nan")
    trainer.step(x, y, v)
