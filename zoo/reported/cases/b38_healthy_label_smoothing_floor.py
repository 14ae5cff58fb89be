"""HEALTHY: label smoothing 0.2 over 20 classes: the loss falls to its floor of about 1.1 and stays there although accuracy is 100%.

Source: https://github.com/pytorch/pytorch/issues/130342 https://github.com/lxztju/pytorch_classification/issues/9
True cause: none
Where: none
Fix: none
"""
import torch
from torch import nn

torch.set_num_threads(1)


def build(fixed=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 24, 3, 2, 1), nn.BatchNorm2d(24), nn.SiLU(), nn.Conv2d(24, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.SiLU(), nn.Flatten(), nn.Linear(32 * 9, 20))
    criterion = nn.CrossEntropyLoss(label_smoothing=0.2)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3)
    proto = torch.randn(20, 3, 12, 12)
    batches = []
    for _ in range(110):
        y = torch.randint(0, 20, (32,))
        batches.append((proto[y] + 0.2 * torch.randn(32, 3, 12, 12), y))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: criterion(m(b[0]), b[1]))
