"""A CNN with fastai's head (concat pool, BatchNorm1d, linear); 65 images in batches of 8: every epoch ends with a single image.

Source: https://github.com/fastai/fastai/issues/1352 https://github.com/NRCan/geo-deep-learning/issues/113
True cause: batch norm over one sample
Where: head (BatchNorm1d)
Fix: drop_last=True
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


class ConcatPool(nn.Module):
    def forward(self, x):
        return torch.cat([F.adaptive_max_pool2d(x, 1), F.adaptive_avg_pool2d(x, 1)], 1).flatten(1)


def build(fixed=False):
    torch.manual_seed(7)
    body = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.ReLU())
    head = nn.Sequential(ConcatPool(), nn.BatchNorm1d(48), nn.Dropout(0.25), nn.Linear(48, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, 4))
    model = nn.Sequential()
    model.add_module("body", body)
    model.add_module("head", head)
    opt = torch.optim.Adam(model.parameters(), 1e-3, betas=(0.9, 0.99))
    y = torch.randint(0, 4, (65,))
    x = torch.randn(65, 3, 20, 20) + y[:, None, None, None] * 0.7
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8, drop_last=fixed)
    batches = [b for _ in range(3) for b in loader]
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
