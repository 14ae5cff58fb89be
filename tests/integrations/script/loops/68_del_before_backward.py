# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 5
# source: memory saving, batch and outputs deleted before backward
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)

model = nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    batch = {"x": torch.randn(8, 6), "y": torch.randn(8, 2)}
    if BAD and step == 5:
        batch["y"][5, 0] = float("nan")
    x, y = batch["x"], batch["y"]
    del batch
    out = model(x)
    loss = F.mse_loss(out, y)
    del x, y, out
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    del loss
