"""Pedestrian forecasting with a bivariate normal: the correlation is a raw output (tanh was left out), and for one far pedestrian it passes 1: the covariance is not positive definite.

Source: https://github.com/abduallahmohamed/Social-STGCNN/issues/68 https://github.com/robotgradient/iflow/issues/2
True cause: the covariance handed to MultivariateNormal is not positive definite
Where: loss_fn (MultivariateNormal)
Fix: 0.95 * tanh(.), and coordinates relative to the scene
"""
import torch
from torch import nn
from torch.distributions import MultivariateNormal
from torch.nn.functional import softplus

torch.set_num_threads(1)


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru, self.out = nn.GRU(2, 32, batch_first=True), nn.Linear(34, 5)

    def forward(self, past):
        h = self.gru(past)[0][:, -1]
        return self.out(torch.cat([h, past[:, -1]], -1))


def build(fixed=False):
    torch.manual_seed(9)
    model = Forecaster()
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    batches = []
    for i in range(28):
        steps = 0.3 * torch.randn(8, 9, 2)
        xy = steps.cumsum(1)
        if i == 10 and not fixed:
            xy[4] += torch.tensor([150.0, -90.0])  # not relative to the scene, as the others are
        batches.append((xy[:, :8], xy[:, 8]))

    def loss_fn(m, b):
        o = m(b[0])
        sx, sy = softplus(o[:, 2]) + 0.05, softplus(o[:, 3]) + 0.05
        rho = 0.95 * torch.tanh(o[:, 4]) if fixed else 0.5 * o[:, 4]
        cov = torch.stack([torch.stack([sx * sx, rho * sx * sy], -1), torch.stack([rho * sx * sy, sy * sy], -1)], -2)
        return -MultivariateNormal(o[:, :2], cov).log_prob(b[1]).mean()

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn, max_grad_norm=5.0)
