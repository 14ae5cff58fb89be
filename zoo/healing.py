"""How many runs of the zoo end healthy: in a plain loop, under the guard, under a guard that heals, and with everything on
(`heal`, `salvage`, a copy of the state every 4 steps, the data through `guard.wrap`).

python -m zoo.healing [--only NAME ...] [--save]     # about two minutes on one core

A run ends healthy if it trains to its end, not if it merely survives:

- it reaches its last batch: no exception, no halt; of the batches no more than a third was stepped over;
- in the last third of its steps every step is taken, with a finite loss, and no incident is dated there;
- weights, buffers and optimizer state are finite at the end;
- its last weights, judged by the healthy twin's own loss on the twin's last batches, have made at least half of the twin's
  progress (asked only where the twin's loss falls by 5% or more: a policy gradient's does not say);
- in the last third its weights move at least a tenth as far as the twin's, and most of its gradients are not exactly 0 (unless
  the twin's are).

The twin of a benign case is the case itself in a plain loop.

Where the fault comes so late that the last third would begin before it, the batches after it are repeated until it does not.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import logging
import math
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import nanproof
from zoo.plain import load, steps
from zoo.registry import CASES, Case, Training

HALF_OF_THE_TWINS = 0.5
"""Share of the twin's progress that a healthy run has made."""
MOVES = 0.1
"""Share of the twin's movement in the last third."""
OTHER_WEIGHTS = {"learned_std_crosses_zero": "the twin's parameter is the logarithm of the case's"}
"""Cases whose weights mean something else in the twin: there the losses of the runs themselves are compared."""
FALLS = 0.05
"""The twin's loss has to fall by this share of its size to say anything."""


@dataclass
class Run:
    """What came of one training."""

    training: Training
    batches: list[Any]
    taken: list[bool] = field(default_factory=list)
    """Of every step, whether it was taken with a finite loss."""
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    error: str = ""
    incidents: list[nanproof.Incident] = field(default_factory=list)
    at_two_thirds: list[Tensor] = field(default_factory=list)
    first: list[Tensor] = field(default_factory=list)

    @property
    def tail(self) -> int:
        return math.ceil(len(self.batches) * 2 / 3)

    def moved(self) -> float:
        """How far the weights went in the last third, relative to their size."""
        now = [p.detach().double() for p in self.training.model.parameters()]
        if not self.at_two_thirds:
            return 0.0
        far = sum(float((a - b).square().sum()) for a, b in zip(now, self.at_two_thirds, strict=True))
        size = sum(float(b.square().sum()) for b in self.at_two_thirds)
        return math.sqrt(far / size) if size else math.nan

    def idle(self) -> float:
        """Share of the last third in which every gradient is exactly 0."""
        last = self.norms[self.tail :]
        return sum(n == 0 for n in last) / len(last) if last else 0.0

    def snapshot(self) -> list[Tensor]:
        return [p.detach().double().clone() for p in self.training.model.parameters()]


def long_enough(t: Training, case: Case) -> list[Any]:
    """The batches, those after the fault repeated until the last third begins after it."""
    batches = list(t.batches)
    if case.step is None or case.step + 1 >= len(batches):
        return batches
    after = batches[case.step + 1 :]
    while math.ceil(len(batches) * 2 / 3) <= case.step:
        batches += after
    return batches


def plainly(case: Case, fixed: bool) -> Run:
    """The loop most people write."""
    t = case.build(fixed)
    run = Run(t, long_enough(t, case))
    t.batches = run.batches
    run.first = run.snapshot()
    try:
        for i, (loss, norm) in enumerate(steps(t)):
            # The zoo's loop has no check, and a step of NaN is a step taken; only a GradScaler skips.
            run.losses.append(float(loss))
            run.norms.append(norm)
            run.taken.append(bool(torch.isfinite(loss)) and (t.scaler is None or math.isfinite(norm)))
            if i + 1 == run.tail:
                run.at_two_thirds = run.snapshot()
    except Exception as error:
        run.error = f"{type(error).__name__}: {error}"[:120]
    return run


def guarded(case: Case, **policy: Any) -> Run:
    """train_step, or the user's own loop where the case has one."""
    t = case.build(False)
    run = Run(t, long_enough(t, case))
    run.first = run.snapshot()
    guard = nanproof.Guard(
        t.model,
        t.optimizer,
        loss_fn=t.loss_fn,
        max_norm=t.max_norm,
        scaler=t.scaler,
        scheduler=t.scheduler,
        policy=nanproof.Policy(**policy),
    )
    try:
        for i, batch in enumerate(guard.wrap(run.batches) if guard.policy.snapshot_every else run.batches):
            if t.own_loop:
                loss = t.loss_fn(t.model, batch)
                (t.scaler.scale(loss) if t.scaler else loss).backward()
                guard.step(loss)
            else:
                guard.train_step(batch)
            if i + 1 == run.tail:
                run.at_two_thirds = run.snapshot()
    except Exception as error:
        run.error = f"{type(error).__name__}: {error}"[:120]
    finally:
        guard.close()
    last = {record.step: record for record in guard.history}  # of a step that was run again, the last word
    run.losses, run.norms = [last[i].loss for i in sorted(last)], [last[i].grad_norm for i in sorted(last)]
    run.taken = [last[i].action != "skipped" and math.isfinite(last[i].loss) for i in sorted(last)]
    run.incidents = guard.incidents
    if guard.policy.snapshot_every and not run.error and len(run.taken) >= run.tail:
        run.batches = run.batches[: len(run.taken)]  # some were stepped over
    return run


def finite(t: Training) -> bool:
    """Weights, buffers (a mask of -inf is meant) and optimizer state."""
    state = [v for s in t.optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    for tensor in (*t.model.parameters(), *t.model.buffers(), *state):
        if tensor.is_floating_point() and bool((torch.isnan(tensor) | (tensor == torch.inf)).any()):
            return False
    return True


class Yardstick:
    """The healthy twin: its loss, by which the weights of all three runs are judged."""

    def __init__(self, case: Case) -> None:
        self.run = plainly(case, fixed=case.cause != "benign")
        self._same_weights = case.name not in OTHER_WEIGHTS
        self.moved, self.idle = self.run.moved(), self.run.idle()
        self.losses = list(self.run.losses)
        t = self.run.training
        self._state = copy.deepcopy(t.model.state_dict())
        self._last = self.run.batches[self.run.tail :][:8]
        self.end = self._loss()
        for p, value in zip(t.model.parameters(), self.run.first, strict=True):
            p.data.copy_(value)
        self.start = self._loss()

    def _loss(self) -> float:
        t = self.run.training
        torch.manual_seed(1234)
        with torch.no_grad():
            losses = [float(t.loss_fn(t.model, batch)) for batch in self._last]
        return sum(losses) / len(losses)

    @property
    def says_something(self) -> bool:
        return self.start - self.end > FALLS * abs(self.start)

    def progress(self, run: Run) -> float:
        """Share of the twin's own progress."""
        if not self._same_weights:
            own, end = _mean(run.losses[run.tail :]), _mean(self.losses[self.run.tail :])
            return (self.losses[0] - own) / (self.losses[0] - end)
        t = self.run.training
        try:
            t.model.load_state_dict(run.training.model.state_dict())
            return (self.start - self._loss()) / (self.start - self.end)
        except Exception:
            return math.nan


def _mean(numbers: list[float]) -> float:
    return sum(numbers) / len(numbers)


def unhealthy(run: Run, twin: Yardstick) -> str:
    """Why a run does not end healthy; empty if it does."""
    if run.error:
        return f"ended in {run.error}"
    if len(run.taken) < len(run.batches) or not all(run.taken[run.tail :]):
        lost = sum(not x for x in run.taken[run.tail :])
        return f"{lost} of the last {len(run.batches) - run.tail} steps lost"
    late = [i for i in run.incidents if i.step >= run.tail]
    if late:
        return f"incident at step {late[0].step} of {len(run.batches)}"
    if not finite(run.training):
        return "weights, buffers or optimizer state not finite"
    moved = run.moved()
    if not moved >= MOVES * twin.moved:
        return f"weights move {moved:.2g} in the last third, the twin's {twin.moved:.2g}"
    if run.idle() > 0.5 >= twin.idle:
        return f"a gradient of exactly 0 in {run.idle():.0%} of the last third"
    if twin.says_something:
        share = twin.progress(run)
        if not share >= HALF_OF_THE_TWINS:
            return f"made {share:.2g} of the twin's progress"
    return ""


def judge(name: str) -> dict[str, Any]:
    case = CASES[name]
    yardstick = Yardstick(case)
    ways: dict[str, Callable[[], Run]] = {
        "plain": lambda: plainly(case, fixed=False),
        "guard": lambda: guarded(case),
        "heal": lambda: guarded(case, heal=True),
        "all": lambda: guarded(case, heal=True, salvage=True, snapshot_every=4),
    }
    marks: dict[str, Any] = {"name": name, "cause": case.cause}
    for way, run in ways.items():
        done = run()
        why = unhealthy(done, yardstick)
        marks[way] = {"healthy": not why, "why": why, "lost": sum(not x for x in done.taken)}
        if not done.error and finite(done.training) and yardstick.says_something:
            marks[way]["progress"] = round(yardstick.progress(done), 3)
        if way in ("heal", "all"):
            said = [i.remedy for i in done.incidents if i.remedy is not None]
            marks[way]["remedies"] = said
    return marks


def table(cases: list[dict[str, Any]]) -> str:
    """One line a cause: how many of its cases end healthy each way."""
    count, ways = Counter(c["cause"] for c in cases), ("plain", "guard", "heal", "all")
    lines = ["| cause | cases | plain loop | guard | heal | heal, salvage, snapshots |", "|---|---|---|---|---|---|"]
    for cause in sorted(count):
        mine = [c for c in cases if c["cause"] == cause]
        lines.append(f"| {cause} | {len(mine)} | " + " | ".join(str(sum(c[w]["healthy"] for c in mine)) for w in ways) + " |")
    total = " | ".join(f"**{sum(c[w]['healthy'] for c in cases)}**" for w in ways)
    return "\n".join([*lines, f"| **all** | **{len(cases)}** | {total} |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    load()
    cases = []
    for name in [n for n in CASES if not args.only or n in args.only]:
        start = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            marks = judge(name)
        cases.append(marks)
        said = "  ".join(f"{w}: {marks[w]['why'] or 'healthy'}" for w in marks if w not in ("name", "cause"))
        print(
            f"{name} ({marks['cause']}, {time.perf_counter() - start:.1f} s)  {said}  {marks['heal']['remedies']}",
            file=sys.stderr,
        )
    print(table(cases))
    if args.save and not args.only:
        rule = {"progress": HALF_OF_THE_TWINS, "moves": MOVES, "falls": FALLS}
        from tools.results import save

        save("heal", "cpu", {"rule": rule, "cases": cases})


if __name__ == "__main__":
    main()
