import torch
import torch.nn as nn
import torch.nn.functional as F


class VAE(nn.Module):
    def __init__(self, d=36, z=8):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(d, 64), nn.ReLU())
        self.mu, self.logvar = nn.Linear(64, z), nn.Linear(64, z)
        self.dec = nn.Sequential(nn.Linear(z, 64), nn.ReLU(), nn.Linear(64, d))

    def forward(self, x):
        h = self.enc(x)
        mu, logvar = self.mu(h), self.logvar(h)
        z = mu + torch.exp(0.5 * logvar) * torch.randn_like(mu) if self.training else mu
        return self.dec(z), mu, logvar


def build(fixed=False, seed=0):
    torch.manual_seed(seed)
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    batch = dict(x=torch.rand(16, 36, generator=torch.Generator().manual_seed(54)))

    def loss_fn(model, batch):
        out, mu, logvar = model(batch["x"])
        bce = F.binary_cross_entropy_with_logits(out, batch["x"], reduction="none").sum(1).mean()
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(1).mean()
        return bce + kl

    return dict(model=model, optimizer=optimizer, batch=batch, loss_fn=loss_fn)
