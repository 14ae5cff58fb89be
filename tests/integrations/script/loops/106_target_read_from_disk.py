# again: no
# stops: target = torch.from_numpy(np.load(path))
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 6
# source: precomputed targets read from disk after the forward
import os
import sys
import tempfile
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
np.random.seed(0)

path = os.path.join(tempfile.mkdtemp(), "target.npy")
model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
for step in range(8):
    stored = np.random.randn(8, 3).astype("float32")
    if BAD and step == 5:
        stored[6, 1] = np.nan
    np.save(path, stored)
    x = torch.randn(8, 4)
    out = model(x)
    target = torch.from_numpy(np.load(path))
    loss = F.mse_loss(out, target)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    os.remove(path)
