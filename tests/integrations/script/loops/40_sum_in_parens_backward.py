# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 5
# source: two losses added in the backward expression
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
accum = 1

model = nn.ModuleDict({"body": nn.Linear(4, 8), "a": nn.Linear(8, 2), "b": nn.Linear(8, 1)})
opt = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(8):
    x, ya, yb = torch.randn(8, 4), torch.randint(0, 2, (8,)), torch.randn(8)
    if BAD and step == 5:
        x[5, 0] = float("inf")
    h = F.relu(model["body"](x))
    loss_a = F.cross_entropy(model["a"](h), ya)
    loss_b = F.mse_loss(model["b"](h).view(-1), yb)
    opt.zero_grad()
    ((loss_a + 0.5 * loss_b) / accum).backward()
    opt.step()
