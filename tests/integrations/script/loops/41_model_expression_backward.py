# again: yes
# step: 5
# kind: nonfinite-gradient
# cause: sqrt-at-zero
# sample: 1
# line: model(x).pow(2).sum(1).sqrt().mean().backward()
# source: minimal benchmark that calls backward on an expression of the model
import sys
import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Tanh(), nn.Linear(6, 3, bias=False))
opt = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(8):
    x = torch.randn(8, 4)
    if BAD and step == 5:
        x[1] = 0.0
    opt.zero_grad()
    model(x).pow(2).sum(1).sqrt().mean().backward()
    opt.step()
