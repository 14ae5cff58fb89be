"""Tabular regression with two faults: one row of batch 40 has its target in metres instead of kilometres (a finite spike), and the cosine schedule was planned for 60 of 115 steps (then nothing moves).

Source: https://github.com/tensorflow/models/issues/3868 https://github.com/MIC-DKFZ/nnUNet/issues/197
True cause: an outlier row, then a rate of 0
Where: batch 40; the schedule
Fix: drop the row; plan the schedule for all steps
"""
import math

import torch
from torch import nn

torch.set_num_threads(1)


class TabularNet(nn.Module):
    def __init__(self, cats=12, cont=6):
        super().__init__()
        self.emb = nn.Embedding(cats, 8)
        self.layers = nn.Sequential(nn.Linear(cont + 8, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, cat, cont):
        return self.layers(torch.cat([self.emb(cat), cont], 1)).squeeze(1)


def build(fixed=False):
    torch.manual_seed(0)
    model = TabularNet()
    opt = torch.optim.AdamW(model.parameters(), 4e-3)
    total = 150 if fixed else 60
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 0.5 * (1 + math.cos(math.pi * min(1.0, s / total))))
    effect, w = torch.randn(12), torch.randn(6)
    batches = []
    for i in range(115):
        cat, cont = torch.randint(0, 12, (32,)), torch.randn(32, 6)
        y = effect[cat] + cont @ w + 2.0
        if i == 40 and not fixed:
            y[11] = y[11].abs() * 1000 + 500
        batches.append((cat, cont, y))
    return dict(model=model, optimizer=opt, scheduler=sched, batches=batches, loss_fn=lambda m, b: nn.functional.mse_loss(m(b[0], b[1]), b[2]), max_grad_norm=1.0)
