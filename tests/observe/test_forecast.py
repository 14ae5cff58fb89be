"""Forecasts: what is said of records that were made for it, of real runs, and what is not said."""

from __future__ import annotations

import math
from array import array
from itertools import pairwise

import pytest
import torch
from torch import nn

from nanproof import Forecast, Observed, StepRecord
from nanproof.observe._early import DepthWatch, EntropyWatch, MomentWatch, ScaleWatch, SizeWatch
from nanproof.observe._forecast import Forecaster
from nanproof.observe._trend import fit
from zoo.forecast.runs import RUNS, failure_step, guarded

SITES = ("layers.0", "layers.1")
HALF = [torch.float16, torch.float16]


def record(step: int, absmax=(1.0, 1.0), loss=1.0, norm=1.0, scale=None, lr=1e-3, **seen) -> StepRecord:
    observed = Observed(sites=SITES[: len(absmax)], absmax=array("d", absmax), **seen)
    return StepRecord(
        step=step, loss=loss, grad_norm=norm, action="stepped", clip=1.0, lr=(lr,), scale=scale, spike=False, typical=(0.0, 0.0),
        spread=(0.0, 0.0), loss_size=1.0, weights_checked=False, names=("a", "b"), norms=array("d", (norm, norm)),
        observed=observed,
    )  # fmt: skip


def forecaster(optimizer=torch.optim.AdamW) -> Forecaster:
    return Forecaster(SITES, optimizer([nn.Parameter(torch.zeros(2))], lr=1e-3), set())


def told(records, dtypes=HALF, **kwargs) -> list[Forecast]:
    watch = forecaster(**kwargs)
    return [said for r in records for said in watch.see(r, dtypes)]


def updates(ratio: float, over_lr: float = 0.5) -> dict[str, array]:
    return {"ratio": array("d", (ratio, ratio)), "changed": array("d", (1.0, 1.0)), "over_lr": array("d", (over_lr, over_lr))}


def test_a_line_is_what_least_squares_say():
    torch.manual_seed(0)
    values = torch.randn(40, 3, dtype=torch.float64) + torch.arange(40.0, dtype=torch.float64)[:, None] * torch.tensor(
        [0.1, -0.2, 0.0]
    )
    x = torch.stack((torch.arange(40.0), torch.ones(40)), 1).double()
    slow = torch.linalg.lstsq(x, values).solution
    found = fit(values)
    torch.testing.assert_close(found.slope, slow[0])
    torch.testing.assert_close(found.end, slow[0] * 39 + slow[1])
    left = (values - x @ slow).square().sum(0)
    torch.testing.assert_close(found.fits, 1 - left / (values - values.mean(0)).square().sum(0))
    torch.testing.assert_close(found.late, torch.linalg.lstsq(x[20:], values[20:]).solution[0])


@pytest.mark.parametrize("kind", ["exponential", "linear"])
def test_an_overflow_is_foreseen_to_the_step(kind):
    grow = (lambda i: 1.1**i) if kind == "exponential" else (lambda i: 300.0 * i + 1)
    arrives = next(i for i in range(1000) if grow(i) >= 65504)
    said = told(record(i, (grow(i), 3.0)) for i in range(arrives))
    assert {(f.kind, f.where, f.also) for f in said} == {("activation-overflow", "layers.0", ())}
    nearer = [f.steps for f in said if f.steps is not None]
    assert len(nearer) == len(said) <= 3 and all(b < a / 4 for a, b in pairwise(nearer)), "again when near"
    first = said[0]
    assert first.steps is not None and first.margin is not None
    assert abs(first.step + first.steps - arrives) <= (1 if kind == "exponential" else first.margin)
    assert arrives - first.step >= 20 and "fp16's maximum in about" in first.message
    wide = [torch.bfloat16, torch.float32]
    assert told((record(i, (grow(i), 3.0)) for i in range(arrives)), wide) == [], "far below what these can hold"


@pytest.mark.parametrize(
    "level",
    [
        lambda i: 20000.0,
        lambda i: 20000 * (1 - math.exp(-i / 30)),
        lambda i: 40000 / (1 + math.exp(-(i - 60) / 20)),
        lambda i: 10000 + 5000 * math.sin(i / 40),
        lambda i: 500 * 1.02 ** min(i, 100),
        lambda i: math.nan if i % 9 == 0 else 2.0,
        lambda i: -1.0,
    ],
)
def test_what_settles_is_not_spoken_of(level):
    assert told(record(i, (level(i), 1.0)) for i in range(400)) == []


def test_several_that_grow_are_one_forecast_and_come_again_only_after_they_were_gone():
    watch = forecaster()
    said: list[Forecast] = []
    for i in range(80):
        said += watch.see(record(i, (300 * 1.05**i, 100 * 1.05**i)), HALF)
    assert said[0].where == "layers.0" and "layers.1" not in {f.where for f in said}
    before = len(said)
    watch.rewound()
    for i in range(80, 400):
        said += watch.see(record(i, (10.0, 10.0)), HALF)
    for i in range(400, 480):
        said += watch.see(record(i, (300 * 1.05 ** (i - 400), 5.0)), HALF)
    assert before < len(said) <= 2 * before


def diverging(step: int, ratio: float | None) -> StepRecord:
    seen = {} if ratio is None else {"updates": updates(ratio)}
    return record(step, (1.1**step, 1.0), loss=1.15**step, norm=1.1**step, **seen)


def test_divergence_is_told_from_data_that_grows_by_what_the_weights_do():
    wide = [torch.float32, torch.float32]
    moved = told((diverging(i, 0.2) for i in range(60)), wide)
    assert [f.kind for f in moved] == ["divergence"] and moved[0].step < 30
    assert told((diverging(i, 0.002) for i in range(60)), wide) == [], "the weights stay where they are"
    watch = forecaster()
    for i in range(40):
        assert watch.see(diverging(i, None), wide) == []
    assert watch.asks, "a look at the weights would tell"
    assert told((record(i, (1.1**i, 1.0), loss=1 / (1 + i), updates=updates(0.2)) for i in range(60)), wide) == [], (
        "the loss falls"
    )


def test_a_loss_scale_that_finds_its_level_is_healthy_and_one_that_goes_on_falling_is_not():
    def said(scales):
        watch = ScaleWatch()
        return [f for i, s in enumerate(scales) if (f := watch.see(record(i, scale=s))) is not None]

    calibrates = [65536.0 / 2 ** min(i, 12) for i in range(40)] + [16.0] * 200
    assert said(calibrates) == []
    falls = [65536.0] * 40 + [65536.0 / 2 ** (i // 10) for i in range(140)]
    found = said(falls)
    assert [f.kind for f in found] == ["loss-scale-collapse"] and falls[found[0].step] == 128


def test_updates_that_outgrow_the_weights():
    watch = SizeWatch()
    steps = [record(i, lr=1e-3, updates=updates(0.01)) for i in range(10, 80, 5)]
    assert all(watch.see(r) is None for r in steps)
    assert watch.see(record(100, lr=1e-3)) is None and not watch.asks
    assert watch.see(record(101, lr=2e-3)) is None and watch.asks, "the learning rate has doubled"
    found = watch.see(record(102, lr=0.1, updates=updates(0.3)))
    assert found is not None and found.kind == "divergence" and "30 times" in found.message
    assert watch.see(record(103, lr=0.1, updates=updates(0.3))) is None, "said once"


def test_second_moments_that_are_stale_in_several_parameters():
    adam = torch.optim.Adam([nn.Parameter(torch.zeros(2))], lr=1e-3)
    watch = MomentWatch(adam, set())
    assert watch.see(record(0, updates=updates(0.01, 1.0))) is None
    for i in range(1, 3000):
        watch.see(record(i, norm=1.0))
    assert not watch.asks
    watch.see(record(3000, norm=100.0))
    assert watch.asks
    found = watch.see(record(3001, norm=100.0, updates=updates(0.1, 2.7)))
    assert found is not None and found.kind == "stale-second-moment" and "2.7 times" in found.message
    one = {**updates(0.1), "over_lr": array("d", (2.7, 0.5))}
    assert MomentWatch(adam, set()).see(record(0, updates=one)) is None
    assert MomentWatch(adam, {"a", "b"}).see(record(0, updates=updates(0.1, 9.0))) is None, "rows that are seldom used"
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=1e-3)
    assert MomentWatch(sgd, set()).see(record(0, updates=updates(0.1, 9.0))) is None


def test_a_signal_that_has_come_to_multiply_from_layer_to_layer():
    sites = tuple(f"layers.{i}" for i in range(12))

    def seen(step: int, factor: float, backwards: bool = False) -> StepRecord:
        rms = array("d", (factor ** (11 - i if backwards else i) for i in range(12)))
        flat = array("d", [1.0] * 12)
        observed = Observed(
            sites=sites, absmax=flat, outputs={"rms": flat if backwards else rms}, gradients={"rms": rms} if backwards else {}
        )
        return StepRecord(**{**{f: getattr(record(step), f) for f in StepRecord.__dataclass_fields__}, "observed": observed})

    for backwards in (False, True):
        watch = DepthWatch(sites)
        assert watch.see(seen(0, 1.1, backwards)) is None
        found = watch.see(seen(50, 3.0, backwards))
        assert found is not None and found.kind == "exploding-depth" and found.where == sites[0 if backwards else -1]
    watch = DepthWatch(sites)
    assert all(watch.see(seen(i, 3.0)) is None for i in range(0, 300, 50)), "a model that was made like that"


def test_attention_that_has_come_to_see_one_key():
    watch = EntropyWatch()
    assert watch.see(record(0, attention={"attn": (2.0, 0.9, 0.8)})) is None
    assert watch.see(record(50, attention={"attn": (40.0, 0.03, 0.01)})) is None, "sharp, and its logits are small"
    found = watch.see(record(100, attention={"attn": (400.0, 0.03, 0.0)}))
    assert found is not None and found.kind == "entropy-collapse" and found.where == "attn"
    sharp = EntropyWatch()
    assert all(sharp.see(record(i, attention={"attn": (400.0, 0.01, 0.0)})) is None for i in range(0, 300, 50)), "always was"


@pytest.mark.parametrize("name", ["fp16-residual-growth/2", "step-size-too-large/1", "scale-falls-and-falls/0"])
def test_real_runs_are_warned_of_before_they_fail(name):
    guard = guarded(next(run for run in RUNS if run.name == name), observe=True)
    failed = failure_step(guard)
    assert failed is not None and guard.forecasts and guard.forecasts[0].step < failed - 5
