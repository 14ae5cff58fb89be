# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 2
# source: learned uncertainty weights kept outside of the model
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)

net = nn.Linear(5, 2)
log_vars = [torch.zeros((), requires_grad=True) for _ in range(2)]
optimizer = torch.optim.Adam(list(net.parameters()) + log_vars, lr=1e-2)
for step in range(8):
    x, y = torch.randn(8, 5), torch.randn(8, 2)
    if BAD and step == 5:
        x[2, 1] = float("nan")
    pred = net(x)
    loss = 0
    for i in range(2):
        precision = torch.exp(-log_vars[i])
        diff = (pred[:, i] - y[:, i]) ** 2.0
        loss += torch.sum(precision * diff + log_vars[i], -1)
    loss = torch.mean(loss)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
