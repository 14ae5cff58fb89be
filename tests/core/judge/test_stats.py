"""Running statistics, against a plain Python rewrite, and against everything that could spoil them."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanproof.core.judge._stats import CLAMP, LEAST_SPIKE, MEAN_WINDOW, SPREAD_WINDOW, RunningStats

CPU = torch.device("cpu")
weird = st.sampled_from([float("nan"), float("inf"), -float("inf"), 0.0, 1e38, -1e38])


def fresh(warmup=5):
    return RunningStats(CPU, torch.float32, warmup, 18.0)


def feed(stats, total, loss, accepted=True):
    loss = torch.tensor(float(loss))
    point = stats.point(torch.tensor(float(total)), loss)
    spike = stats.is_spike(point)
    stats.take(point, loss, spike, torch.tensor(accepted))
    return bool(spike)


class Slow:
    """The same statistics of one quantity, in plain Python."""

    def __init__(self, warmup, least):
        self.warmup, self.least = warmup, least
        self.count, self.mean, self.spread, self.last = 0, 0.0, 0.0, 0.0

    def take(self, x):
        bound = max(self.spread * CLAMP, self.least) if self.count >= self.warmup else math.inf
        gap = min(max(x - self.mean, -bound), bound)
        value = self.mean + gap
        if self.count:
            self.spread += (min(abs(value - self.last) / math.sqrt(2), bound) - self.spread) / min(self.count, SPREAD_WINDOW)
        self.last = value
        self.mean += gap / min(self.count + 1, MEAN_WINDOW)
        self.count += 1


def test_they_are_what_a_plain_rewrite_computes():
    rng = random.Random(0)
    stats, norm, loss, size = fresh(), Slow(5, LEAST_SPIKE[0]), Slow(5, LEAST_SPIKE[1]), 0.0
    for i in range(300):
        total, value = math.exp(rng.gauss(0, 0.3)) * (30 if i == 100 else 1), 2 + rng.gauss(0, 0.2) - 4 * (i > 200)
        feed(stats, total, value)
        norm.take(math.log(total))
        loss.take(math.asinh(value / (size if i else abs(value))))
        size += ((min(abs(value), 2 * size) if i else abs(value)) - size) / min(i + 1, MEAN_WINDOW)
    assert stats.size.item() == pytest.approx(size, rel=1e-4)
    torch.testing.assert_close(stats.mean, torch.tensor([norm.mean, loss.mean]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(stats.spread, torch.tensor([norm.spread, loss.spread]), rtol=1e-3, atol=1e-3)


@settings(max_examples=50)
@given(st.lists(st.tuples(weird, weird), min_size=1, max_size=20))
def test_no_refused_value_leaves_a_trace(values):
    stats = fresh()
    for _ in range(10):
        feed(stats, 1.0, 2.0)
    before = stats.state.clone()
    for total, loss in values:
        point = stats.point(torch.tensor(total), torch.tensor(loss))
        stats.take(point, torch.tensor(loss), torch.tensor(False), torch.tensor(False))
    assert torch.equal(stats.state, before)


def test_nothing_is_a_spike_before_the_warm_up():
    stats = fresh(warmup=5)
    assert not any(feed(stats, 10.0**i, 10.0**i) for i in range(5))


@pytest.mark.parametrize(("total", "loss"), [(50.0, 2.0), (2.5, 40.0), (50.0, 40.0)])
def test_a_spike_of_either_is_seen_and_hardly_moves_the_mean(total, loss):
    rng = random.Random(1)
    stats = fresh()
    for _ in range(60):
        assert not feed(stats, math.exp(rng.gauss(0, 0.1)), 2 + rng.gauss(0, 0.05))
    before = stats.mean.clone()
    assert feed(stats, total, loss)
    assert (stats.mean - before).abs().max() < 0.11
    assert not feed(stats, 1.0, 2.0)


def test_a_trend_is_no_spike():
    stats = fresh()
    assert not any(feed(stats, math.exp(0.03 * i), 5 * math.exp(-0.03 * i)) for i in range(200))


def test_ten_spikes_in_a_row_are_a_new_level():
    stats = fresh()
    for _ in range(40):
        feed(stats, 1.0, 2.0)
    spikes = [feed(stats, 1000.0, 2.0) for _ in range(40)]
    assert spikes == [True] * 10 + [False] * 30


def test_a_loss_may_cross_zero():
    """A policy gradient's loss: usually about -0.3, now and then 0 or positive."""
    rng = random.Random(2)
    stats = fresh()
    assert not any(feed(stats, 1.0, rng.choice((-0.3, -0.35, -0.28, 0.0, 0.05)) + rng.gauss(0, 0.02)) for _ in range(300))
    assert not feed(stats, 1.0, 1e8)
    assert feed(stats, 3.0, 1e8)


def test_a_loss_of_nothing_at_first_does_not_blind():
    stats = fresh()
    for _ in range(3):
        feed(stats, 1.0, 0.0)
    rng = random.Random(3)
    for _ in range(400):
        assert not feed(stats, 1.0, 1 + rng.gauss(0, 0.05))
    assert feed(stats, 3.0, 200.0)
