"""Early signs: what ordinary runs of ordinary optimizers do is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import nanproof
from nanproof import Observe
from nanproof.observe._early import STALE, YOUNG


@pytest.mark.parametrize("every", [1, 50])
def test_the_first_steps_of_radam_are_no_stale_second_moment(every):
    """It does without the second moment at first: then a step is as long as the gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
    x = torch.randn(64, 8)
    y = 30 * torch.sin(x.sum(1, keepdim=True))
    optimizer = torch.optim.RAdam(model.parameters(), lr=1e-6)
    observe = Observe(every=every)
    with nanproof.Guard(
        model, optimizer, loss_fn=lambda m, b: (m(b) - y).square().sum(), observe=observe, max_norm=None
    ) as guard:
        for _ in range(30):
            guard.train_step(x)
    first = guard.history[0].observed
    assert first is not None and min(first.updates["over_lr"]) > STALE and not guard.forecasts


def test_adams_first_steps_are_short_whatever_the_gradients():
    """So nothing is missed by not looking at them: the longest there is, by Cauchy and Schwarz, for common settings."""
    for b1, b2 in ((0.9, 0.999), (0.9, 0.95), (0.95, 0.99), (0.5, 0.999)):
        for steps in range(1, YOUNG + 1):
            firsts = [(1 - b1) * b1**i / (1 - b1**steps) for i in range(steps)]
            seconds = [(1 - b2) * b2**i / (1 - b2**steps) for i in range(steps)]
            assert sum(f * f / s for f, s in zip(firsts, seconds, strict=True)) ** 0.5 < 1.5 < STALE


def test_gradients_that_grow_at_once_are_one():
    """Many small ones, then large ones: the second moment of Adam has not followed."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6)
    x = torch.randn(32, 8)
    with nanproof.Guard(model, optimizer, loss_fn=lambda m, b: m(x).sum() * b, observe=Observe(every=1), max_norm=None) as guard:
        for i in range(310):
            guard.train_step(1e-3 if i < 300 else 1.0)
    said = [f for f in guard.forecasts if f.kind == "stale-second-moment"]
    assert len(said) == 1 and 300 <= said[0].step < 310
