"""HEALTHY: a Poisson VAE on expression counts: the loss starts in the ten thousands and falls, one cell in twenty-five batches is a doublet with six times the depth, gradients are clipped from 1e4 to 1.

Source: https://github.com/scverse/scvi-tools/issues/2965
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


class CountVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = nn.Sequential(nn.Linear(40, 48), nn.ReLU(), nn.Linear(48, 12)), nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 40))

    def forward(self, counts):
        depth = counts.sum(-1, keepdim=True)
        mu, logvar = self.enc(torch.log1p(counts)).chunk(2, -1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar.clamp(-8, 8)).exp()
        return depth * self.dec(z).softmax(-1), mu, logvar.clamp(-8, 8)


def build(fixed=False):
    torch.manual_seed(38)
    model = CountVAE()
    opt = torch.optim.Adam(model.parameters(), 3e-3)
    programs, batches = torch.rand(3, 40) ** 3, []
    for i in range(75):
        rate = programs[torch.randint(0, 3, (12,))] * 2000
        if i % 25 == 13:
            rate[4] *= 6
        batches.append(torch.poisson(rate))

    def loss_fn(m, x):
        rate, mu, logvar = m(x)
        rec = F.poisson_nll_loss(rate, x, log_input=False, full=True, reduction="none").sum(-1)
        return (rec - 0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).sum(-1)).mean()

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn, max_grad_norm=1.0)
