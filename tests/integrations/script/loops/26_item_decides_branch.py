# again: no
# stops: if gap.item() > 0.0:
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 3
# source: loss term added when a measured value passes a threshold
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(8):
    x = torch.randn(8, 4)
    y = torch.randn(8, 1)
    if BAD and step == 5:
        x[3, 0] = float("nan")
    pred = model(x)
    loss = F.mse_loss(pred, y)
    gap = (pred.mean() - y.mean()).abs() - 0.05
    if gap.item() > 0.0:
        loss = loss + 0.1 * gap
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
