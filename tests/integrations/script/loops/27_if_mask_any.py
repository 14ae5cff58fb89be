# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 4
# source: segmentation loop that adds a loss when a class is present
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)

model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(8):
    x = torch.randn(8, 6)
    y = torch.randint(0, 2, (8,))
    amount = torch.rand(8)
    if BAD and step == 5:
        y[4] = 1
        amount[4] = float("nan")
    out = model(x)
    loss = F.cross_entropy(out, y)
    positive = y == 1
    if positive.any():
        loss = loss + F.mse_loss(out[positive, 1], amount[positive])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
