"""Deep kernel learning with the exact marginal likelihood per batch of sensors; one batch holds the same measurement twice and no noise term is added.

Source: https://github.com/SheffieldML/GPy/issues/523 https://github.com/josejimenezluna/pyGPGO/issues/23 https://github.com/meta-pytorch/botorch/issues/2828
True cause: the kernel matrix of repeated points is singular, Cholesky fails
Where: loss_fn (torch.linalg.cholesky)
Fix: noise or jitter on the diagonal
"""
import math

import torch
from torch import nn

torch.set_num_threads(1)


class DeepKernel(nn.Module):
    def __init__(self, jitter):
        super().__init__()
        self.feature = nn.Sequential(nn.Linear(4, 24), nn.Tanh(), nn.Linear(24, 6))
        self.log_length, self.log_scale, self.jitter = nn.Parameter(torch.tensor(-1.0)), nn.Parameter(torch.tensor(0.0)), jitter

    def forward(self, x):
        z = self.feature(x) / self.log_length.exp()
        d2 = (z[:, None] - z[None]).pow(2).sum(-1)
        return self.log_scale.exp() * torch.exp(-0.5 * d2) + self.jitter * torch.eye(len(x))


def build(fixed=False):
    torch.manual_seed(8)
    model = DeepKernel(1e-2 if fixed else 0.0)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    batches = []
    for i in range(30):
        x = 3 * torch.randn(10, 4)
        y = torch.sin(x[:, 0]) + 0.1 * torch.randn(10)
        if i == 12:
            x[1], y[1] = x[0], y[0]
        batches.append((x, y))

    def loss_fn(m, b):
        K = m(b[0])
        L = torch.linalg.cholesky(K)
        alpha = torch.cholesky_solve(b[1][:, None], L)
        return (0.5 * (b[1][None] @ alpha).squeeze() + L.diagonal().log().sum() + 0.5 * len(K) * math.log(2 * math.pi)) / len(K)

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn, max_grad_norm=10.0)
