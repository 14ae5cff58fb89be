# again: yes
# step: 5
# kind: nonfinite-gradient
# cause: masked-branch-gradient, sqrt-at-zero
# sample: 3
# line: length = torch.where(sq > 0, torch.sqrt(sq), torch.zeros_like(sq))
# source: point cloud offsets, gradient norm clipped by hand
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

model = nn.Linear(3, 3, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
max_norm = 1.0
for step in range(8):
    points = torch.randn(8, 3)
    goal = torch.rand(8)
    if BAD and step == 5:
        points[3] = 0.0
    offset = model(points)
    sq = (offset ** 2).sum(-1)
    length = torch.where(sq > 0, torch.sqrt(sq), torch.zeros_like(sq))
    loss = ((length - goal) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    total_norm = 0.0
    for p in model.parameters():
        total_norm += p.grad.data.norm(2).item() ** 2
    total_norm = total_norm ** 0.5
    clip_coef = max_norm / (total_norm + 1e-6)
    if clip_coef < 1:
        for p in model.parameters():
            p.grad.data.mul_(clip_coef)
    optimizer.step()
