# again: yes
# step: 5
# kind: nonfinite-loss
# cause: zero-denominator
# sample: 4
# line: residual = u_x - u / x
# source: physics-informed network trained with L-BFGS
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=2)

for it in range(7):
    points = torch.rand(8, 1) + 0.1
    if BAD and it == 5:
        points[4] = 0.0

    def closure():
        optimizer.zero_grad()
        x = points.clone().requires_grad_(True)
        u = net(x)
        u_x = torch.autograd.grad(u, x, torch.ones_like(u), create_graph=True)[0]
        residual = u_x - u / x
        loss_f = torch.mean(residual ** 2)
        loss_b = (net(torch.ones(1, 1)) - 1.0).pow(2).mean()
        loss = loss_f + loss_b
        loss.backward()
        return loss

    optimizer.step(closure)
