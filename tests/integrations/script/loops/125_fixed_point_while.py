# again: no
# stops: while residual.item() > 1e-2 and iters < 20:
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 3
# source: deep equilibrium model solved until a tolerance in the loop
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)

cell = nn.Linear(4, 4)
with torch.no_grad():
    cell.weight.mul_(0.3)
inject, head = nn.Linear(3, 4), nn.Linear(4, 1)
opt = torch.optim.Adam([*cell.parameters(), *inject.parameters(), *head.parameters()], lr=1e-3)
for step in range(8):
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    if BAD and step == 5:
        x[3, 0] = float("nan")
    u = inject(x)
    z = torch.zeros(8, 4)
    residual, iters = torch.tensor(1.0), 0
    while residual.item() > 1e-2 and iters < 20:
        z_new = torch.tanh(cell(z) + u)
        residual = (z_new - z).norm()
        z, iters = z_new, iters + 1
    loss = F.mse_loss(head(z), y)
    opt.zero_grad()
    loss.backward()
    opt.step()
