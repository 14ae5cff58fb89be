# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 5
# source: schedule object advanced before the forward, its value kept in a name
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Anneal:
    def __init__(self, n):
        self.i, self.n = 0, n

    def step(self):
        self.i += 1
        return min(1.0, self.i / self.n)


class Runner:
    def __init__(self):
        self.net = nn.Linear(4, 4)
        self.opt = torch.optim.Adam(self.net.parameters(), lr=1e-3)
        self.anneal = Anneal(10)

    def __call__(self, x, target):
        beta = self.anneal.step()
        out = self.net(x)
        loss = F.mse_loss(out, target) + beta * 0.1 * out.abs().mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()


runner = Runner()
for i in range(8):
    x = torch.randn(8, 4)
    target = x.flip(1)
    if BAD and i == 5:
        x[5, 0] = float("nan")
    runner(x, target)
