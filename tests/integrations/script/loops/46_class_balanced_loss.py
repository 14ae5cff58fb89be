# again: yes
# step: 5
# kind: nonfinite-loss
# cause: zero-denominator
# line: loss = (per_class / counts).mean()
# source: class-balanced loss from counts in the batch
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
C = 3

model = nn.Linear(5, C)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    x = torch.randn(8, 5)
    y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])
    if BAD and step == 5:
        y[y == 2] = 0
    logits = model(x)
    ce = F.cross_entropy(logits, y, reduction="none")
    counts = torch.bincount(y, minlength=C).float()
    per_class = torch.zeros(C).index_add(0, y, ce)
    loss = (per_class / counts).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
