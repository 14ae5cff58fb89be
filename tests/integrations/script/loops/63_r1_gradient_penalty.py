# again: yes
# step: 6
# iteration: 3
# kind: nonfinite-gradient
# cause: sqrt-at-zero
# sample: 5
# line: grad_norm = torch.sqrt(grad.pow(2).sum(dim=1))
# source: GAN with a gradient penalty on real samples
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import autograd

BAD = "bad" in sys.argv
torch.manual_seed(0)

gen = nn.Linear(2, 4)
critic = nn.Sequential(nn.Linear(4, 16, bias=False), nn.ReLU(), nn.Linear(16, 1))
g_opt = torch.optim.Adam(gen.parameters(), lr=1e-3)
d_opt = torch.optim.Adam(critic.parameters(), lr=1e-3)
lambda_gp = 10.0

for it in range(5):
    real = torch.randn(8, 4)
    if BAD and it == 3:
        real[5] = 0.0
    z = torch.randn(8, 2)
    real.requires_grad_(True)
    d_real = critic(real)
    d_fake = critic(gen(z).detach())
    grad = autograd.grad(
        outputs=d_real.sum(), inputs=real,
        create_graph=True, retain_graph=True,
    )[0]
    grad_norm = torch.sqrt(grad.pow(2).sum(dim=1))
    gradient_penalty = ((grad_norm - 1) ** 2).mean()
    d_loss = F.softplus(-d_real).mean() + F.softplus(d_fake).mean() + lambda_gp * gradient_penalty
    d_opt.zero_grad()
    d_loss.backward()
    d_opt.step()

    g_loss = F.softplus(-critic(gen(torch.randn(8, 2)))).mean()
    g_opt.zero_grad()
    g_loss.backward()
    g_opt.step()
