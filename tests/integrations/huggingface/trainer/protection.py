"""Who protects the Trainers of these tests, and what a protected `train()` must have left behind.

Kept apart from conftest.py so that a test can switch the protection off for the run it compares with: see `plain`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import nanproof

_off = 0
UNPROTECTED = os.environ.get("NANPROOF_HF_UNPROTECTED", "") not in ("", "0")
LAG = int(os.environ["NANPROOF_HF_LAG"]) if os.environ.get("NANPROOF_HF_LAG") else None


@dataclass
class Run:
    """One protected `train()`: the guard, and the steps that it has to have a record of."""

    guard: Any
    steps: int = 0
    """Optimizer steps of this `train()`, by the Trainer's own count."""

    def finished(self, trainer: Any) -> None:
        self.steps = trainer.state.global_step - trainer._initial_global_step
        recorded = self.guard.history[-self.steps :] if self.steps else []
        assert len(recorded) == self.steps, f"{self.steps} steps were taken, {len(recorded)} were seen"
        begin = trainer._initial_global_step
        assert [record.step for record in recorded] == list(range(begin, begin + self.steps))


def protect(trainer: Any, runs: list[Run]) -> None:
    """Before the first `train()` of a Trainer, as a user does; this one and those that follow are checked."""
    guard = nanproof.protect(trainer, policy=nanproof.Policy(lag=LAG))
    protected_train = trainer.train

    def checked_train(*args: Any, **kwargs: Any) -> Any:
        run = Run(guard)
        runs.append(run)
        result = protected_train(*args, **kwargs)
        run.finished(trainer)
        return result

    trainer.train = checked_train


def is_off() -> bool:
    return _off > 0


@contextmanager
def plain() -> Iterator[None]:
    """Trainers in here are not protected: what they train is what the protected ones are compared with."""
    global _off
    _off += 1
    try:
        yield
    finally:
        _off -= 1
