# again: yes
# step: 5
# kind: nonfinite-loss
# cause: exp-overflow, outlier-batch
# sample: 6
# line: kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1)
# source: VAE with the reparameterisation written in the loop
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc_mu = nn.Linear(5, 2)
        self.fc_logvar = nn.Linear(5, 2)
        with torch.no_grad():
            self.fc_logvar.weight.fill_(0.1)

    def forward(self, x):
        return self.fc_mu(x), self.fc_logvar(x)


encoder, decoder = Encoder(), nn.Linear(2, 5)
optimizer = torch.optim.Adam(list(encoder.parameters()) + list(decoder.parameters()), lr=1e-3)
for batch_idx in range(8):
    data = torch.randn(8, 5)
    if BAD and batch_idx == 5:
        data[6] = 210.0
    optimizer.zero_grad()
    mu, logvar = encoder(data)
    std = torch.exp(0.5 * logvar)
    eps = torch.randn_like(std)
    z = mu + eps * std
    recon = decoder(z)
    bce = F.l1_loss(recon, data, reduction="none").mean(1).clamp(max=100.0)
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp(), dim=1)
    loss = torch.mean(bce + 0.1 * kld)
    loss.backward()
    optimizer.step()
