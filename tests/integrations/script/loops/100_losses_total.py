# again: yes
# step: 5
# kind: nonfinite-loss
# cause: log-of-zero
# sample: 1
# line: losses["bits"] = -(y * torch.log2(q)).sum(1).mean()
# source: dict of losses filled item by item, losses["total"].backward()
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)

model = nn.Linear(5, 4)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(8):
    x = torch.randn(8, 5)
    y = F.one_hot(torch.randint(0, 4, (8,)), 4).float()
    prior = torch.full((8, 4), 0.25)
    if BAD and step == 5:
        prior[1] = 1.0 - y[1]
    out = model(x)
    q = torch.softmax(out, 1) * prior
    losses = {}
    losses["bits"] = -(y * torch.log2(q)).sum(1).mean()
    losses["l2"] = 1e-3 * out.pow(2).mean()
    losses["total"] = losses["bits"] + losses["l2"]
    optimizer.zero_grad(set_to_none=True)
    losses["total"].backward()
    optimizer.step()
    row = {"step": step, **{k: v.item() for k, v in losses.items()}}
