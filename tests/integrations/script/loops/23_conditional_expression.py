# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 1
# source: config flag that picks the loss in a conditional expression
import sys
from types import SimpleNamespace
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
cfg = SimpleNamespace(loss="l1", aux=True, lr=1e-2)

model = nn.Linear(5, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=cfg.lr)
for step in range(8):
    x, y = torch.randn(8, 5), torch.randn(8, 2)
    if BAD and step == 5:
        x[1, 1] = float("-inf")
    out = model(x)
    loss = F.l1_loss(out, y) if cfg.loss == "l1" else F.mse_loss(out, y)
    loss = loss + (0.01 * out.pow(2).mean() if cfg.aux else 0.0)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
