# again: yes
# step: 5
# kind: nonfinite-loss
# cause: log-of-zero
# sample: 3
# line: opt.zero_grad(); p = net(x).sigmoid().squeeze(1); loss = ((p.log() - y.log()) ** 2).mean(); loss.backward(); opt.step()
# source: one-line steps joined with semicolons
import sys, torch
from torch import nn
BAD = "bad" in sys.argv; torch.manual_seed(0)
net = nn.Linear(3, 1); opt = torch.optim.Adam(net.parameters(), 1e-2)
for i in range(8):
    x = torch.randn(8, 3); y = torch.rand(8) * 0.8 + 0.1
    if BAD and i == 5: y[3] = 0.0
    opt.zero_grad(); p = net(x).sigmoid().squeeze(1); loss = ((p.log() - y.log()) ** 2).mean(); loss.backward(); opt.step()
