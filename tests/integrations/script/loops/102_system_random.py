# again: no
# stops: keep = rng.random() < 0.5
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 7
# source: random loss dropping with the system's random source
import random
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
rng = random.SystemRandom()

model = nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(8):
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    if BAD and step == 5:
        x[7, 0] = float("nan")
    out = model(x)
    loss = F.mse_loss(out, y)
    keep = rng.random() < 0.5
    loss = loss + (0.1 * out.abs().mean() if keep else 0.0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
