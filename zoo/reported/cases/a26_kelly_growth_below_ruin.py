"""A portfolio network maximises log growth, -mean(log1p(position . returns)); leverage is allowed, and on a crash day the loss is more than the capital: log1p below -1.

Source: https://github.com/c2siorg/tensormap/issues/408 https://github.com/BVLC/caffe/issues/6415
True cause: the logarithm of a negative number
Where: loss_fn (log1p)
Fix: bound the loss of a day before the logarithm
"""
import torch
from torch import nn

torch.set_num_threads(1)


def build(fixed=False):
    torch.manual_seed(26)
    model = nn.Sequential(nn.Linear(8, 48), nn.Tanh(), nn.Linear(48, 3), nn.Softplus())
    opt = torch.optim.Adam(model.parameters(), 2e-3)
    batches = []
    for i in range(48):
        x = torch.randn(16, 8)
        r = 0.02 * torch.randn(16, 3) + 0.03 * x[:, :3]
        if i == 14:
            r[9] = torch.tensor([-0.95, -0.97, -0.92])
        batches.append((x, r.clamp(min=-0.98)))

    def loss_fn(m, b):
        growth = (m(b[0]) * b[1]).sum(-1)
        if fixed:
            growth = growth.clamp(min=-0.9)
        return -torch.log1p(growth).mean()

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn, max_grad_norm=1.0)
