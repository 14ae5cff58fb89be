# again: yes
# step: 5
# kind: nonfinite-gradient
# cause: sqrt-at-zero
# sample: 1
# line: d_ap = (ea - ep).pow(2).sum(1).sqrt()
# source: face embedding with a triplet loss written by hand
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)

net = nn.Sequential(nn.Linear(5, 10), nn.Tanh(), nn.Linear(10, 3))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
triplets = [tuple(torch.randn(8, 5) for _ in range(3)) for _ in range(8)]
if BAD:
    triplets[5][1][1] = triplets[5][0][1]

for step, (anchor, positive, negative) in enumerate(triplets):
    optimizer.zero_grad()
    ea, ep, en = net(anchor), net(positive), net(negative)
    d_ap = (ea - ep).pow(2).sum(1).sqrt()
    d_an = (ea - en).pow(2).sum(1).sqrt()
    loss = F.relu(d_ap - d_an + 3.0).mean()
    if step % 4 == 0:
        message = f"step {step} loss {loss.item():.3f}"
    loss.backward()
    optimizer.step()
