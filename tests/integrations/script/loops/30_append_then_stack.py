# again: no
# stops: losses.append(F.cross_entropy(logits, y))
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 1
# source: recurrent loop that appends a loss per item, then stacks
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRUCell(3, 6)
        self.out = nn.Linear(6, 4)

    def forward(self, x, h):
        h = self.rnn(x, h)
        return self.out(h), h


net = Net()
opt = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(8):
    seq = torch.randn(5, 8, 3)
    ys = torch.randint(0, 4, (5, 8))
    if BAD and step == 5:
        seq[2, 1, 0] = float("nan")
    h = None
    losses = []
    for x, y in zip(seq, ys):
        logits, h = net(x, h)
        losses.append(F.cross_entropy(logits, y))

    opt.zero_grad()
    torch.stack(losses).mean().backward()
    opt.step()
