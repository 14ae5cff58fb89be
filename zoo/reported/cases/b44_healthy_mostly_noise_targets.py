"""HEALTHY: returns forecasting where nine tenths of the target is noise: (N, 1) against (N, 1), the loss falls from 1.0 to 0.9 and no further, which is all there is.

Source: https://github.com/WangChangqi98/CSS/issues/8
True cause: none
Where: none
Fix: none
"""
import torch
from torch import nn

torch.set_num_threads(1)


def build(fixed=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(20), nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 1))
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.05)
    factor = torch.randn(20, 1) / 20**0.5
    batches = []
    for _ in range(120):
        x = torch.randn(256, 20)
        y = 0.35 * (x @ factor) + 0.93 * torch.randn(256, 1)
        batches.append((x, y))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: nn.functional.mse_loss(m(b[0]), b[1]))
