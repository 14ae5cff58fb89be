"""Loops that clip in every way there is, one after the other; step BAD has a bad gradient in one parameter.

python clipping_loops.py no|nan|inf OUT
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import utils
from torch.nn.utils import clip_grad_norm_

BAD, CULPRIT = 5, "2.bias"


def coefficient(parameters):
    total = torch.stack([p.grad.norm() for p in parameters]).norm()
    return (0.1 / (total + 1e-6)).clamp(max=1.0)


def each(write):
    def clip(parameters):
        c = coefficient(parameters)
        for p in parameters:
            write(p, c)

    return clip


def replaced(p, c):
    p.grad = p.grad * c


def in_data(p, c):
    p.grad.data *= c


def by_pair(parameters):
    total = utils.get_total_norm([p.grad for p in parameters])
    utils.clip_grads_with_norm_(parameters, 0.1, total)


def by_own_total(parameters):
    utils.clip_grads_with_norm_(parameters, 0.1, torch.stack([p.grad.norm() for p in parameters]).norm())


def by_value_and_norm(parameters):
    utils.clip_grad_value_(parameters, 0.01)
    clip_grad_norm_(parameters, 0.02)


LOOPS = {
    "clip_grad_norm_": lambda ps: clip_grad_norm_(ps, 0.1),
    "from a generator": lambda ps: clip_grad_norm_((p for p in ps), 0.1),
    "largest element": lambda ps: clip_grad_norm_(ps, 0.1, norm_type=float("inf")),
    "without foreach": lambda ps: clip_grad_norm_(ps, 0.1, foreach=False),
    "raising": lambda ps: clip_grad_norm_(ps, 0.1, error_if_nonfinite=True),
    "pair": by_pair,
    "own total": by_own_total,
    "value": lambda ps: utils.clip_grad_value_(ps, 0.01),
    "value and norm": by_value_and_norm,
    "mul_": each(lambda p, c: p.grad.mul_(c)),
    "div_": each(lambda p, c: p.grad.div_(1 / c)),
    "data": each(in_data),
    "new gradient": each(replaced),
    "clamp_": each(lambda p, c: p.grad.clamp_(-0.01, 0.01)),
    "_foreach_mul_": lambda ps: torch._foreach_mul_([p.grad for p in ps], coefficient(ps)),
}
REPLACES = "nan_to_num_"


def nan_to_zero(parameters):
    c = coefficient(parameters)
    for p in parameters:
        p.grad.mul_(c if torch.isfinite(c) else 1).nan_to_num_(0.0, 0.0, 0.0)


def train(clip, bad, skip):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters())
    for i in range(10):
        x = torch.randn(4, 8)
        if i == BAD and skip:
            continue
        loss = model(x).square().mean()
        if i == BAD and bad != "no":
            nothing = model[2].bias - model[2].bias.detach()
            loss = loss + (nothing * (0 if bad == "nan" else 1)).sqrt().sum()  # 0, with a gradient of 0 * inf or inf
        optimizer.zero_grad()
        loss.backward()
        clip(list(model.parameters()))
        optimizer.step()
    return model.state_dict()


if __name__ == "__main__":
    bad, out = sys.argv[1:]
    loops = {**LOOPS, REPLACES: nan_to_zero}
    torch.save({name: train(clip, bad.removeprefix("never"), bad == "never") for name, clip in loops.items()}, out)
