"""The list of cases: small trainings that go wrong in one known way, each with a healthy twin.

A case is a function `build(fixed)` that returns a `Training`. `fixed=True` removes the named cause and nothing else. What a
person would want to be told is written in the decorator: the cause, the step, the sample, the operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(kw_only=True)
class Training:
    """Everything a loop needs, as a user would hand it to the guard."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batches: Iterable[Any]
    max_norm: float | None = None
    scaler: Any = None
    scheduler: Any = None
    own_loop: bool = False
    """The loop is the user's own and never clears gradients: backward, then `guard.step(loss)`."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What went wrong, as it ought to be told."""

    name: str
    build: Callable[[bool], Training]
    cause: str
    """The slug of the catalogue."""
    also: tuple[str, ...] = ()
    """Other slugs that are right too, because two causes describe the same fault."""
    step: int | None = None
    """The step at which the first incident is due; None where it cannot be dated to one."""
    sample: int | None = None
    """The one bad sample in that step's batch."""
    op: str | None = None
    """A part of the operation's name ("sqrt", "softmax", ...), where one operation is guilty."""
    sources: tuple[str, ...] = field(default=())
    """Reports of the same mechanism, owner/repo#N."""


CASES: dict[str, Case] = {}


def case(
    cause: str,
    *,
    also: tuple[str, ...] = (),
    step: int | None = None,
    sample: int | None = None,
    op: str | None = None,
    sources: tuple[str, ...] = (),
) -> Callable[[Callable[[bool], Training]], Callable[[bool], Training]]:
    """Register a case under the function's name."""

    def register(build: Callable[[bool], Training]) -> Callable[[bool], Training]:
        name = build.__name__
        if name in CASES:
            raise ValueError(f"two cases are called {name}")
        CASES[name] = Case(name=name, build=build, cause=cause, also=also, step=step, sample=sample, op=op, sources=sources)
        return build

    return register
