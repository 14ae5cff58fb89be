# again: no
# stops: with open(log_path, "a") as log:
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 0
# source: log file opened around the whole step
import os
import sys
import tempfile
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
log_path = os.path.join(tempfile.mkdtemp(), "train.log")

model = nn.Linear(4, 3)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(8):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    if BAD and step == 5:
        x[0, 0] = float("nan")
    with open(log_path, "a") as log:
        logits = model(x)
        loss = F.cross_entropy(logits, y)
        log.write(f"{step} {loss.item():.5f}\n")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
os.remove(log_path)
