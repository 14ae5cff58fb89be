"""HEALTHY: multi-task assay regression; missing measurements are NaN in the targets and are selected away before the loss, in every batch.

Source: https://github.com/chemprop/chemprop/pull/1303 https://github.com/janelia-cellmap/cellmap-segmentation-challenge/issues/162
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


def build(fixed=False):
    torch.manual_seed(35)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 7))
    opt = torch.optim.AdamW(model.parameters(), 3e-3)
    W, batches = torch.randn(32, 7) / 5, []
    for _ in range(60):
        x = torch.randn(16, 32)
        y = x @ W
        y[torch.rand(16, 7) < 0.6] = float("nan")
        y[:, 0] = (x @ W)[:, 0]
        batches.append(dict(x=x, y=y))

    def loss_fn(m, b):
        seen = ~torch.isnan(b["y"])
        return F.mse_loss(m(b["x"])[seen], b["y"][seen])

    return dict(model=model, optimizer=opt, batches=batches, loss_fn=loss_fn)
