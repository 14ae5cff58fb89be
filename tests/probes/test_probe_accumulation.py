"""Micro-batches that add up to one large batch, or do not."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanproof
from probed import causes, probed


def batch():
    g = torch.Generator().manual_seed(0)
    return torch.randn(8, 6, generator=g), torch.randn(8, generator=g)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.1), nn.Tanh(), nn.Linear(16, 1))


def mean(model, batch):
    return F.mse_loss(model(batch[0]).squeeze(-1), batch[1])


def summed(model, batch):
    return F.mse_loss(model(batch[0]).squeeze(-1), batch[1], reduction="sum")


@pytest.mark.parametrize(
    ("loss_fn", "factor"),
    [
        (mean, None),
        (lambda m, b: (m(b[0]).squeeze(-1) - b[1]).square().mean(), None),
        (lambda m, b: 0.25 * mean(m, b), None),
        (lambda m, b: 0.7 * mean(m, b) + 0.1 * sum(p.square().sum() for p in m.parameters()), None),
        (lambda m, b: summed(m, b) / len(b[0]), None),
        (summed, "1/4 of"),
        (lambda m, b: sum(F.mse_loss(m(x[None])[0, 0], y) for x, y in zip(*b, strict=True)), "1/4 of"),
        (lambda m, b: summed(m, b) / 8, "1/4 of"),
    ],
    ids=["mean", "by hand", "weighted", "two terms", "divided by its samples", "sum", "sum of samples", "constant"],
)
def test_four_micro_batches(loss_fn, factor):
    found = probed(model(), batch(), loss_fn, accumulate=4).found
    assert [d.cause for d in found] == ([] if factor is None else ["accumulation-not-averaged"])
    assert factor is None or factor in found[0].evidence[0]


def test_a_micro_batch_without_targets_is_not_a_sum():
    """The other micro-batch has the whole gradient, as under a sum."""

    def loss_fn(model, batch):
        x, y, weights = batch
        return ((model(x).squeeze(-1) - y).square() * weights).sum() / weights.sum().clamp(min=1)

    weights = torch.tensor([0.0] * 4 + [1.0] * 4)
    assert causes(model(), (*batch(), weights), loss_fn, accumulate=2) == []


def test_without_accumulation_nothing_is_asked():
    assert causes(model(), batch(), mean) == []
    with pytest.raises(nanproof.UsageError, match="accumulate"):
        causes(model(), batch(), mean, accumulate=0)
