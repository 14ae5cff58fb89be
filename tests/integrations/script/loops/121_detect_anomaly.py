# again: yes
# step: 5
# kind: exception
# cause: sqrt-at-zero
# sample: 2
# line: distance = torch.sqrt(torch.sum((emb_a - emb_b) ** 2, dim=1))
# source: debugging run with detect_anomaly around the step
import sys
import warnings
import torch
import torch.nn as nn

warnings.filterwarnings("ignore")
BAD = "bad" in sys.argv
torch.manual_seed(0)

net = nn.Sequential(nn.Linear(4, 6), nn.Tanh())
optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
for step in range(8):
    a, b = torch.randn(8, 4), torch.randn(8, 4)
    if BAD and step == 5:
        b[2] = a[2]
    with torch.autograd.set_detect_anomaly(True):
        emb_a, emb_b = net(a), net(b)
        distance = torch.sqrt(torch.sum((emb_a - emb_b) ** 2, dim=1))
        loss = (distance - 1.0).abs().mean()
        optimizer.zero_grad()
        loss.backward()
    optimizer.step()
