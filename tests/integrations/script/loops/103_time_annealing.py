# again: no
# stops: beta = min(1.0, (time.time() - start) / 60.0)
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 4
# source: weight annealed by wall-clock time
import sys
import time
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
start = time.time()

enc, dec = nn.Linear(5, 4), nn.Linear(2, 5)
opt = torch.optim.Adam([*enc.parameters(), *dec.parameters()], lr=1e-3)
for step in range(8):
    x = torch.randn(8, 5)
    target = x.clone()
    if BAD and step == 5:
        target[4, 4] = float("nan")
    mu, logvar = enc(x).chunk(2, 1)
    z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
    rec = F.mse_loss(dec(z), target)
    kl = -0.5 * (1 + logvar - mu ** 2 - logvar.exp()).mean()
    beta = min(1.0, (time.time() - start) / 60.0)
    loss = rec + beta * kl
    opt.zero_grad()
    loss.backward()
    opt.step()
