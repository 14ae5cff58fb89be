# again: yes
# step: 5
# kind: nonfinite-gradient
# cause: sqrt-at-zero
# sample: 4
# line: recon = torch.sqrt(((x_hat - x) ** 2).sum(dim=1)).mean()
# source: autoencoder with separate encoder and decoder
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

encoder = nn.Sequential(nn.Linear(6, 3, bias=False), nn.ReLU())
decoder = nn.Linear(3, 6, bias=False)
optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=1e-3)

for step in range(8):
    x = torch.randn(8, 6)
    if BAD and step == 5:
        x[4] = 0.0
    optimizer.zero_grad()
    z = encoder(x)
    x_hat = decoder(z)
    recon = torch.sqrt(((x_hat - x) ** 2).sum(dim=1)).mean()
    sparsity = 1e-3 * z.abs().mean()
    loss = recon + sparsity
    loss.backward()
    optimizer.step()
