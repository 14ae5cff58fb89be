# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 7
# source: ensemble kept in a plain list
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)

models = [nn.Linear(4, 3) for _ in range(3)]
optimizer = torch.optim.Adam([p for m in models for p in m.parameters()], lr=1e-3)
for step in range(8):
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))
    soft = torch.softmax(torch.randn(8, 3), 1)
    if BAD and step == 5:
        soft[7, 0] = float("nan")
    loss = F.cross_entropy(models[0](x), y)
    loss = loss + F.cross_entropy(models[1](x), soft)
    loss = loss + 0.1 * (models[0](x) - models[2](x)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
