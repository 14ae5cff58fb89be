# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 1
# source: mixing factor from the system's random source, drawn before the model call
import random
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
sysrand = random.SystemRandom()

model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(8):
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    if BAD and step == 5:
        x[1, 0] = float("nan")
    lam = sysrand.uniform(0.3, 0.7)
    x = lam * x + (1 - lam) * x.flip(1)
    pred = model(x)
    loss = lam * F.mse_loss(pred, y) + (1 - lam) * F.l1_loss(pred, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
