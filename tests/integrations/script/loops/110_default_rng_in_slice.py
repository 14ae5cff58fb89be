# again: no
# stops: lam = float(rng.beta(0.5, 0.5))
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 6
# source: manifold mixup with a numpy Generator, drawn between two modules
import sys
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
rng = np.random.default_rng(12649)

features, head = nn.Linear(5, 8), nn.Linear(8, 1)
optimizer = torch.optim.SGD([*features.parameters(), *head.parameters()], lr=0.05)
for step in range(8):
    x, y = torch.randn(8, 5), torch.randn(8, 1)
    if BAD and step == 5:
        y[6] = float("nan")
    h = torch.relu(features(x))
    lam = float(rng.beta(0.5, 0.5))
    mixed = lam * h + (1 - lam) * h.flip(0).detach()
    pred = head(mixed)
    loss = F.mse_loss(pred, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
