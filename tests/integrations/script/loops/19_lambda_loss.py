# again: yes
# step: 5
# kind: nonfinite-loss
# cause: log-of-zero, outlier-batch
# sample: 0
# line: nll = lambda p, y: -torch.log(p[torch.arange(len(y)), y]).mean()
# source: short research script with lambda losses
import sys
import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

net = nn.Linear(4, 3, bias=False)
with torch.no_grad():
    net.weight.copy_(torch.tensor([[1.0] * 4, [0.0] * 4, [-1.0] * 4]) * 0.3)
opt = torch.optim.SGD(net.parameters(), lr=1e-2)
nll = lambda p, y: -torch.log(p[torch.arange(len(y)), y]).mean()
reg = lambda m: sum(w.abs().sum() for w in m.parameters())

for i in range(8):
    x = torch.randn(8, 4)
    y = torch.randint(0, 3, (8,))
    if BAD and i == 5:
        x[0], y[0] = 200.0, 2
    probs = net(x).softmax(-1)
    loss = nll(probs, y) + 1e-4 * reg(net)
    opt.zero_grad()
    loss.backward()
    opt.step()
