# again: no
# stops: if secrets.randbelow(4) > 0:
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 7
# source: coin from the secrets module that adds a regulariser
import secrets
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)

model = nn.Linear(4, 2)
opt = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    x, y = torch.randn(8, 4), torch.randint(0, 2, (8,))
    if BAD and step == 5:
        x[7, 3] = float("nan")
    out = model(x)
    loss = F.cross_entropy(out, y)
    if secrets.randbelow(4) > 0:
        loss = loss + 0.01 * out.pow(2).mean()
    opt.zero_grad()
    loss.backward()
    opt.step()
