"""Small trainings that fail gradually, and healthy ones that look as if they would: what forecasts are calibrated on.

python -m zoo.forecast.runs [--only FAMILY ...] [--twice]     # 157 runs, about a minute and a half on one core

The split "design" is for making a forecaster and setting its limits, "holdout" for judging it once. A family belongs to one
split, and the two have different models and mechanisms, not other seeds only.

A run fails at the step that is refused, or at which divergence began. Where fp16 overflows, a value may have passed the maximum
some steps before: a ReLU turns -inf into 0, and an outer norm hides a lone inf for a while. Some failures are seen coming for a
hundred steps (`fp16-residual-growth`, `log-variance-falls`), some for five (`counts-explode`, `rate-ramps-up`).
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

import nanproof
from zoo.forecast.design import DESIGN
from zoo.forecast.fine import FINE
from zoo.forecast.objectives import OBJECTIVES
from zoo.forecast.parts import Run, Setup
from zoo.forecast.signals import SIGNALS

__all__ = ["RUNS", "Run", "Setup", "failure_step", "guarded"]

RUNS: tuple[Run, ...] = (*DESIGN, *SIGNALS, *OBJECTIVES, *FINE)
FAILURES = (
    "nonfinite-loss",
    "nonfinite-gradient",
    "nonfinite-weight",
    "gradient-norm-overflow",
    "divergence",
    "loss-scale-collapse",
)
FORESEEABLE = 25
"""No failing run fails before this step: there has to be something to foresee it from."""


def failure_step(guard: nanproof.Guard) -> int | None:
    """The first step that was refused for non-finite values, or at which the loss began to grow without end; None if neither.

    Divergence is found some steps after it began and dated to its beginning, so the earliest step counts, not the first
    incident. An overflow that only calibrates a loss scale is no incident.
    """
    return min((incident.step for incident in guard.incidents if incident.kind in FAILURES), default=None)


@dataclass(frozen=True)
class Outcome:
    """What became of a run."""

    run: Run
    failed: int | None
    kind: str
    """Of the failure."""
    steps: int
    seconds: float
    losses: tuple[float, ...]

    @property
    def as_declared(self) -> bool:
        if not self.run.fails:
            return self.failed is None
        return self.failed is not None and self.failed >= FORESEEABLE


def guarded(run: Run, **more: Any) -> nanproof.Guard:
    """The guard of a run that has gone on to its failure, or its end."""
    setup = run.make()
    policy = nanproof.Policy(history=10_000, diagnose="never")
    guard = nanproof.Guard(setup.model, setup.optimizer, loss_fn=setup.loss_fn, policy=policy, **setup.options, **more)
    with guard:
        for _ in range(run.steps):
            guard.train_step(next(setup.batches))
            if failure_step(guard) is not None:
                break
    return guard


def trained(run: Run) -> Outcome:
    """The run under a plain guard."""
    start = time.perf_counter()
    guard = guarded(run)
    failed = failure_step(guard)
    kinds = [incident.kind for incident in guard.incidents if incident.step == failed]
    losses = tuple(record.loss for record in guard.history)
    return Outcome(run, failed, kinds[0] if kinds else "", len(losses), time.perf_counter() - start, losses)


def table(outcomes: list[Outcome]) -> Iterator[str]:
    """One line a family."""
    yield "| family | split | runs | fails | failure step: min, median, max | seconds |"
    yield "|---|---|---|---|---|---|"
    for name in dict.fromkeys(outcome.run.family for outcome in outcomes):
        of_it = [outcome for outcome in outcomes if outcome.run.family == name]
        failed = [outcome.failed for outcome in of_it if outcome.failed is not None]
        when = f"{min(failed)}, {statistics.median(failed):g}, {max(failed)}" if failed else ""
        run, seconds = of_it[0].run, sum(outcome.seconds for outcome in of_it)
        yield f"| {name} | {run.split} | {len(of_it)} | {'yes' if run.fails else 'no'} | {when} | {seconds:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="families whose names contain one of these")
    parser.add_argument("--twice", action="store_true", help="every run a second time: the losses have to be the same to the bit")
    asked = parser.parse_args()
    logging.disable()
    torch.set_num_threads(1)
    outcomes: list[Outcome] = []
    wrong = 0
    for run in RUNS:
        if asked.only and not any(part in run.family for part in asked.only):
            continue
        outcome = trained(run)
        outcomes.append(outcome)
        same = not asked.twice or repr(trained(run).losses) == repr(outcome.losses)
        wrong += not (outcome.as_declared and same)
        remark = ("" if outcome.as_declared else " NOT AS DECLARED") + ("" if same else " NOT THE SAME TWICE")
        when = "-" if outcome.failed is None else f"{outcome.failed} ({outcome.kind})"
        expected = "fails" if run.fails else "healthy"
        print(f"{run.name:36} {run.split:8} {expected:8} {when:28} {outcome.steps:4} steps {outcome.seconds:5.2f} s{remark}")
    print("\n".join(table(outcomes)))
    for split in ("design", "holdout"):
        for fails in (True, False):
            count = sum(outcome.run.split == split and outcome.run.fails == fails for outcome in outcomes)
            print(f"{split}: {count} {'failing' if fails else 'healthy'} runs")
    print(f"{len(outcomes)} runs, {sum(outcome.seconds for outcome in outcomes):.0f} s, {wrong} not as declared")
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()
