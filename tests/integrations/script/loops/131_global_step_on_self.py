# again: no
# stops: self.global_step += 1
# step: 5
# kind: nonfinite-loss
# cause: exp-overflow, outlier-batch
# sample: 5
# line: kl = -0.5 * (1 + log_var - mu.pow(2) - log_var.exp()).sum(1)
# source: VAE trainer with KL annealing by a counter on self
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Linear(4, 4), nn.Linear(2, 4)
        with torch.no_grad():
            self.enc.weight[2:].fill_(0.1)

    def forward(self, x):
        mu, log_var = self.enc(x).chunk(2, dim=1)
        z = mu + torch.randn_like(mu) * torch.exp(0.5 * log_var.clamp(max=10.0))
        return self.dec(z), mu, log_var


class Trainer:
    def __init__(self):
        self.model = VAE()
        self.opt = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.global_step = 0

    def train_batch(self, x):
        recon, mu, log_var = self.model(x)
        rec = F.mse_loss(recon, x)
        kl = -0.5 * (1 + log_var - mu.pow(2) - log_var.exp()).sum(1)
        self.global_step += 1
        beta = min(1.0, self.global_step / 10)
        loss = rec + beta * kl.mean()
        self.opt.zero_grad()
        loss.backward()
        self.opt.step()


trainer = Trainer()
for i in range(8):
    x = torch.randn(8, 4)
    if BAD and i == 5:
        x[5] = 300.0
    trainer.train_batch(x)
