# again: no
# stops: jitter = torch.randn(z.shape, generator=noise_gen)
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 2
# source: noise from a generator of its own, drawn after the encoder
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
noise_gen = torch.Generator().manual_seed(7)

encoder, decoder = nn.Linear(5, 3), nn.Linear(3, 5)
opt = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)
for step in range(8):
    x = torch.randn(8, 5)
    clean = x.clone()
    if BAD and step == 5:
        clean[2, 2] = float("nan")
    z = encoder(x)
    jitter = torch.randn(z.shape, generator=noise_gen)
    recon = decoder(z + 0.1 * jitter)
    loss = F.mse_loss(recon, clean)
    opt.zero_grad()
    loss.backward()
    opt.step()
