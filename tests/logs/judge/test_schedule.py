"""Steps left out, read from the learning rates: against schedules that were simulated step by step, with and without a scaler."""

from __future__ import annotations

import math
import random

import pytest

from nanproof.logs._points import Point
from nanproof.logs._story import Story
from nanproof.logs.judge._findings import judge
from nanproof.logs.judge._schedule import resolutions, skipping

NAN = math.nan
LONG = {11, 12, 17, 20, 25, 28, 29, 31, 32}
"""Seeds of logs that can be read in very many ways: they take four fifths of the time of all 40."""


def rate(kind, taken, total, warmup, base):
    if kind == "constant":
        return base * min(1.0, taken / max(warmup, 1))
    if kind == "steps":
        return base * 0.1 ** (taken // 30)
    if kind == "exponential":
        return base * 0.99**taken
    if taken < warmup:
        return base * taken / warmup
    done = (taken - warmup) / (total - warmup)
    return base * (1 - done if kind == "linear" else 0.5 * (1 + math.cos(math.pi * done)))


def logged(
    kind, *, total=200, each=5, base=2e-4, warmup=0, share=0.0, lag=0, digits=17, known=True, epoch=50, seed=0, steps=True
):
    """The story of a run in which a scaler leaves out a share of the steps, and how many it left out up to the last line."""
    random.seed(seed)
    story, taken, left_out = Story(), 0, 0
    for step in range(1, total + 1):
        before = taken
        taken += random.random() >= share
        if step % each == 0:
            shown = rate(kind, before if lag else taken, total, warmup, base)
            left_out = step - (before if lag else taken)
            story.add(
                Point(
                    {"loss": 1.0, "grad_norm": NAN if share else 1.0, "lr": float(f"{shown:.{digits}g}")},
                    step=step if steps else None,
                    epoch=round(step / epoch, 2),
                    line=step // each,
                    settings={"steps": total} if known else {},
                )
            )
    return story.now, left_out


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 20])
@pytest.mark.parametrize("lag", [0, 1])
@pytest.mark.parametrize("share", [0.2, 0.7])
def test_the_count_is_that_of_the_simulation(kind, warmup, lag, share):
    segment, left_out = logged(kind, warmup=warmup, lag=lag, share=share)
    found = skipping(segment)
    assert found is not None and found.base == pytest.approx(2e-4) and found.total == 200
    assert abs(found.skipped - left_out) <= 1 + lag, "a log that is a step ahead may hide one"


@pytest.mark.parametrize("digits", [17, 4])
def test_four_digits_are_enough_for_a_short_run(digits):
    segment, left_out = logged("linear", total=96, share=0.5, digits=digits)
    found = skipping(segment)
    assert found is not None and abs(found.skipped - left_out) <= 1


def test_a_line_for_every_step_needs_no_plan():
    """Nothing is known of the schedule: most stretches move by the same unit, and the others by none."""
    segment, left_out = logged("linear", each=1, share=0.4, known=False)
    found = skipping(segment)
    assert found is not None and abs(found.skipped - left_out) <= 5, "what was left out before the first fall is not seen"


def test_a_log_without_steps_is_read_with_usual_settings():
    segment, left_out = logged("linear", total=96, each=10, epoch=32, share=0.6, steps=False, known=False, seed=3)
    found = skipping(segment)
    assert found is not None and (found.each, found.epochs, found.total) == (10, 3.0, 96)
    assert found.skipped == left_out


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "steps", "exponential"])
@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.slow if seed in LONG else ()) for seed in range(40)])
def test_silence_about_schedules_that_were_followed(kind, seed):
    """Any warm-up, length, base, digits and form of the log."""
    random.seed(1000 + seed)
    total, each = random.randint(20, 600), random.choice([1, 5, 10, 20, 25])
    segment, _ = logged(
        kind,
        total=total,
        each=each,
        base=random.choice([1e-3, 2e-4, 5e-5, 3e-4, 1.5e-5]),
        warmup=random.choice([0, 0, 5, 10, total // 10]),
        lag=random.choice([0, 1]),
        digits=random.choice([17, 4, 3]),
        known=random.choice([True, False]),
        steps=random.choice([True, False]),
        epoch=max(total // random.choice([1, 2, 3, 4, 7]), 1),
        seed=seed,
    )
    assert skipping(segment) is None


def test_a_schedule_that_stands_still_at_its_end_is_no_skipping():
    """A rate that has reached its last value, as a floor of the schedule is."""
    story = Story()
    for step in range(1, 101):
        story.add(Point({"lr": max(1e-3 * (1 - step / 60), 1e-4), "grad_norm": 1.0, "loss": 1.0}, step=step, line=step))
    assert skipping(story.now) is None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.0003, 0.0002], [5e-5, 5e-5]),
        ([9.583e-05], [5e-9]),
        ([1.958e-4, 9.583e-05], [5e-8, 5e-9]),  # four digits of each
        ([0.000981, 0.000012], [5e-7, 5e-7]),  # six places of each
        ([0.00019583333333333334, 1e-4], [0.0, 0.0]),
    ],
)
def test_what_the_digits_of_a_log_can_say(values, expected):
    assert resolutions(values) == pytest.approx(expected)


def test_few_digits_that_are_all_there_are():
    """3e-4 over 150 steps moves by 2e-6: four digits drop their zeros, and what is left fits exactly."""
    segment, left_out = logged("linear", total=150, base=3e-4, share=0.4, digits=4)
    found = skipping(segment)
    assert found is not None and abs(found.skipped - left_out) <= 1


def test_a_nan_in_the_last_line_of_a_scaled_run_is_a_step_left_out():
    """The rates say that a scaler is at work: the weights are not NaN."""
    segment, _ = logged("linear", share=0.4)
    story = Story()
    for bucket in segment.track("lr").curve.buckets:
        last = bucket.place.step == 200
        values = {"loss": 0.0 if last else 1.0, "grad_norm": NAN if last else 1.0, "lr": bucket.last}
        story.add(Point(values, step=bucket.place.step, line=bucket.place.line, settings={"steps": 200}))
    assert judge(story)[0].kind == "scaler-skipping"
