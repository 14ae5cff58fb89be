"""Small runs that the tests of recovery share: data with an order, guards, and what a run leaves behind."""

from __future__ import annotations

import math

import torch
from torch.utils.data import DataLoader, Dataset

import nanproof
from toys import OPTIMIZERS, mse, net


class Rows(Dataset):
    """Samples of a line with noise; some are bad on purpose."""

    def __init__(self, count=96, bad=(), seed=3):
        g = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 6, generator=g)
        self.y = self.x @ torch.randn(6, generator=g) + 0.1 * torch.randn(count, generator=g)
        for i in bad:
            self.x[i, 1] = math.nan

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def made(optimizer="AdamW-default", scheduler=False, dropout=0.2, **kwargs):
    torch.manual_seed(0)
    model = net(dropout=dropout)
    opt = OPTIMIZERS[optimizer](model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 200) if scheduler else None
    policy = nanproof.Policy(**{"diagnose": "never", **kwargs.pop("policy", {})})
    return nanproof.Guard(model, opt, loss_fn=mse, scheduler=schedule, policy=policy, **kwargs)


def loader(data=None, seed=7, size=8, **kwargs):
    return DataLoader(data or Rows(), size, shuffle=True, generator=torch.Generator().manual_seed(seed), **kwargs)


def weights(guard):
    return {name: t.clone() for name, t in guard.parts.recovery.state.tensors().items()}


def same(a, b):
    return [n for n in a.keys() | b.keys() if n not in a or n not in b or not torch.equal(a[n], b[n])]


def train(guard, data, steps, on_step=None):
    """Epochs over a wrapped loader until the guard has taken so many steps."""
    while guard.next_step < steps:
        for batch in data:
            guard.train_step(batch)
            if on_step is not None:
                on_step(guard)
            if guard.next_step >= steps:
                break


def once(at, action):
    """Do something before one step, the first time it comes."""
    done = []

    def look(guard):
        if guard.next_step == at and not done:
            done.append(True)
            action(guard)

    return look


def poison_weight(guard):
    with torch.no_grad():
        guard.model[0].weight[0, 0] = math.nan


def poison_unused_moment(guard):
    guard.optimizer.state[guard.model[0].weight]["exp_avg_sq"][0, 0] = math.inf


def poison_moment(guard):
    guard.optimizer.state[guard.model[0].weight]["exp_avg"][0, 0] = math.nan


def poison_buffer(guard):
    guard.model[1].running_var[0] = math.nan
