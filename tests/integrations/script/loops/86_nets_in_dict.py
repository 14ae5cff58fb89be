# again: yes
# step: 6
# iteration: 3
# kind: nonfinite-loss
# cause: zero-denominator
# sample: 3
# line: ratio = nets["d"](fake) / nets["d"](real)
# source: GAN with networks and optimizers in dicts
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

nets = {"g": nn.Linear(2, 3), "d": nn.Sequential(nn.Linear(3, 6, bias=False), nn.Tanh(), nn.Linear(6, 1, bias=False))}
opts = {k: torch.optim.Adam(n.parameters(), lr=1e-4) for k, n in nets.items()}
for it in range(5):
    real = torch.randn(8, 3)
    z = torch.randn(8, 2)
    if BAD and it == 3:
        real[3] = 0.0
    fake = nets["g"](z)
    ratio = nets["d"](fake) / nets["d"](real)
    g_loss = torch.log1p(ratio.pow(2)).mean()
    opts["g"].zero_grad()
    g_loss.backward()
    opts["g"].step()

    d_loss = (nets["d"](real) - 1).pow(2).mean() + nets["d"](nets["g"](z).detach()).pow(2).mean()
    opts["d"].zero_grad()
    d_loss.backward()
    opts["d"].step()
