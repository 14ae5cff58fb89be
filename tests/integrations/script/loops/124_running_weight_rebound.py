# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 4
# source: weight from a running average that is rebound before backward
import math
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)

model = nn.Linear(4, 2)
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
avg = 1.0
for step in range(8):
    x, y, v = torch.randn(8, 4), torch.randint(0, 2, (8,)), torch.randn(8)
    if BAD and step == 5:
        v[4] = float("nan")
    out = model(x)
    ce = F.cross_entropy(out, y)
    reg = F.mse_loss(out[:, 0], v)
    loss = ce + reg / avg
    value = reg.item()
    avg = 0.9 * avg + 0.1 * (value if math.isfinite(value) else avg)
    opt.zero_grad()
    loss.backward()
    opt.step()
