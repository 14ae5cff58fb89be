# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 0
# source: batches with a very large loss are skipped before backward
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
skipped = 0
for step in range(8):
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    if BAD and step == 5:
        x[0, 2] = float("nan")
    pred = model(x)
    loss = F.mse_loss(pred, y)
    if loss.item() > 1e4:
        skipped += 1
        continue
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
