"""Whole inputs that nothing depends on, and those that only look like it."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from probed import causes, probed


def tower(width=8):
    return nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 8))


class Fusion(nn.Module):
    """Two inputs, two towers, and a way to join them."""

    def __init__(self, join):
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.head, self.join = tower(), tower(), nn.Linear(8, 3), join
        self.gate, self.null = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.randn(8))
        self.register_buffer("warmup", torch.zeros(()))
        self.register_buffer("bank", torch.randn(8, 8))

    def forward(self, a, b):
        return self.head(F.relu(self.join(self, a, b)))


def batch(**more):
    g = torch.Generator().manual_seed(0)
    made = {"a": torch.randn(8, 8, generator=g), "b": torch.randn(8, 8, generator=g), "y": torch.arange(8) % 3}
    return {**made, **more}


def classify(model, batch):
    return F.cross_entropy(model(batch["a"], batch["b"]), batch["y"])


def read_and_dropped(m, a, b):
    m.right(b)
    return m.left(a)


@pytest.mark.parametrize(
    ("join", "where"),
    [
        (read_and_dropped, "right"),
        (lambda m, a, b: m.left(a) + 0.0 * m.right(b), "right"),
        (lambda m, a, b: m.left(a) * m.right(a), "right"),
        (lambda m, a, b: m.left(a) * (m.left(a) + 1), "left"),
    ],
    ids=["dropped", "gate at 0", "two towers, one input", "one tower, one input"],
)
def test_an_input_without_effect(join, where):
    (found,) = [d for d in probed(Fusion(join), batch(), classify).found if d.cause == "input-ignored"]
    assert "batch['b']" in found.evidence[0] and found.where == where and found.verified


def memory(m, a, b):
    x = m.left(a) + m.bank.mean(0)
    m.bank = m.right(b).detach()
    return x


def target_network(m, a, b):
    with torch.no_grad():
        target = m.right(a)
    return m.left(a) + target


def rounded(m, a, b):
    x = m.right(b)
    return m.left(a) + (torch.zeros_like(x) - x).detach() + x


@pytest.mark.parametrize(
    "join",
    [
        lambda m, a, b: m.left(a) + m.right(b),
        lambda m, a, b: m.left(a),
        lambda m, a, b: m.left(a) + m.gate * m.right(b),
        lambda m, a, b: m.left(a) + m.warmup * m.right(b),
        lambda m, a, b: m.left(a) + (m.null if random.random() < 0.5 else m.right(b)),
        lambda m, a, b: F.dropout(m.left(a), 0.1) * F.dropout(m.left(a), 0.1),
        memory,
        target_network,
        rounded,
    ],
    ids=["used", "not read", "zero gate", "warm-up", "dropped at random", "two passes", "memory", "target", "straight through"],
)
def test_inputs_that_count_or_are_not_read(join):
    for seed in range(3):
        random.seed(seed)
        assert "input-ignored" not in causes(Fusion(join), batch(), classify)


@pytest.mark.parametrize("more", [{"has_b": torch.zeros(8)}, {"done": torch.ones(8)}, {"use_b": False}])
def test_an_input_that_the_batch_turns_off(more):
    assert "input-ignored" not in causes(Fusion(read_and_dropped), batch(**more), classify)


def test_an_embedding_without_effect():
    class Conditional(nn.Module):
        def __init__(self, used):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.lift, self.head, self.used = nn.Embedding(10, 16), nn.Linear(8, 16), nn.Linear(16, 8), used

        def forward(self, x, kind):
            condition = self.embed(kind)
            return self.head(F.silu(self.lift(x) + (condition if self.used else 0)))

    made = {"x": torch.randn(8, 8), "noise": torch.randn(8, 8), "kind": torch.arange(8)}

    def loss_fn(model, batch):
        return F.mse_loss(model(batch["x"] + batch["noise"], batch["kind"]), batch["noise"])

    assert "input-ignored" not in causes(Conditional(True), made, loss_fn)
    (found,) = [d for d in probed(Conditional(False), made, loss_fn).found if d.cause == "input-ignored"]
    assert "batch['kind']" in found.evidence[0] and found.where == "embed"
