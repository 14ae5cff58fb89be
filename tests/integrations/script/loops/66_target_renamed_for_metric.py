# again: yes
# step: 5
# kind: nonfinite-loss
# cause: log-of-zero
# sample: 2
# line: loss = (y * (torch.log(y) - log_p)).sum(1).mean()
# source: soft labels turned into hard ones for accuracy before backward
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)

model = nn.Linear(6, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
correct = seen = 0
for step in range(8):
    x = torch.randn(8, 6)
    y = torch.softmax(torch.randn(8, 3), dim=1)
    if BAD and step == 5:
        y[2] = F.one_hot(torch.tensor(1), 3).float()
    out = model(x)
    log_p = F.log_softmax(out, dim=1)
    loss = (y * (torch.log(y) - log_p)).sum(1).mean()
    out = out.detach().argmax(1)
    y = y.argmax(1)
    correct += (out == y).sum().item()
    seen += len(y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
