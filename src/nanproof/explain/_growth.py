"""Growth: whether the optimizer's own updates have blown the weights up, from the records of the run.

Three numbers have to agree. The records hold the learning rate and the gradients of each step, so they
bound the size of each update. The weights are measured, at the start of the run and now. If one update
was large next to the weights at the start, and the updates together account for the weights now, the
learning rate made them. Weights that something else wrote are larger than any update could be, and an
update that a single huge gradient made is not the rate's fault.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanproof._records import ABSENT, StepRecord
from nanproof.core.judge._parameters import clean_name, local, unwrap
from nanproof.core.support._members import groups_of, owner_of
from nanproof.explain._case import Case

GROWN = 10.0
"""Times the largest weight at the start, from which weights count as blown up."""
LARGE_UPDATE = 0.1
"""Size of an update, next to the largest weight at the start, that no healthy run takes."""
LEAST_WEIGHT = 0.1
"""A largest weight below this counts as this: biases and last layers often start at 0."""
OUTLIER = 10.0
"""Times the largest gradient so far that make a gradient, not the rate, responsible for an update."""
BOUND = 10.0
"""Times the learning rate that an optimizer which normalises its gradients moves a weight at the most: RMSprop's first step."""


@dataclass(frozen=True, slots=True)
class Growth:
    """Weights that the updates of the run have blown up."""

    name: str
    """The parameter with the largest weight."""
    start: float
    """Its largest weight when the run began."""
    now: float
    """Its largest weight now; what the next update would make of it, if that update was undone."""
    step: int
    """The step of the first large update."""
    rate: float
    """The learning rate of that step."""
    update: float
    """Its size, estimated from below."""
    before: tuple[float, int] | None
    """The learning rate before that step and the step it is from, if it was much smaller."""

    @property
    def times(self) -> float:
        """How many times larger the weights are."""
        return self.now / max(self.start, LEAST_WEIGHT) if math.isfinite(self.now) else math.inf

    @property
    def sane_rate(self) -> float:
        """A rate that moves the weights by a thousandth of their size, rounded down to a power of ten."""
        rate = 1e-3 * max(self.start, LEAST_WEIGHT) * self.rate / self.update
        return 10.0 ** math.floor(math.log10(rate) + 1e-9) if 0 < rate < math.inf else 0.0


def growth(case: Case) -> Growth | None:
    """Return how the learning rate has blown the weights up; None if it has not."""
    at_start = case.details.get("largest_at_start")
    if not at_start or case.optimizer is None or case.model is None:
        return None
    trained = {name: p for name, p in _trained(case.model, case.optimizer) if math.isfinite(at_start.get(name, math.nan))}
    records = [r for r in case.history if r.action != "skipped"]
    if case.weights_broke and case.record is not None:
        records.append(case.record)
    if not trained or not records:
        return None
    if case.weights_broke and case.can_look_at_the_step:  # the update was undone: look at what it would have made
        accounts = (_account(case, name, p, at_start[name], None, records) for name, p in trained.items())
        return next((found for found in accounts if found is not None), None)
    largest = {name: _largest(p) for name, p in trained.items()}
    name = max(largest, key=lambda n: largest[n] if math.isfinite(largest[n]) else math.inf)
    return _account(case, name, trained[name], at_start[name], largest[name], records)


def _account(
    case: Case, name: str, parameter: Tensor, start: float, now: float | None, records: Sequence[StepRecord]
) -> Growth | None:
    """Add up what the updates can have made of a weight. `now`: what it is, or None if it is not known."""
    owner, place = owner_of(case.optimizer, parameter), _group_of(case.optimizer, parameter)
    if owner is None or place is None:
        return None
    usual = reach = max(start, LEAST_WEIGHT)
    plain = isinstance(owner, (torch.optim.SGD, torch.optim.ASGD))
    group = case.optimizer.param_groups[place]
    decay, kept = float(group.get("weight_decay") or 0.0), float(group.get("momentum") or 0.0)
    first: tuple[StepRecord, float, float] | None = None
    seen: list[tuple[float, float]] = []
    seen_last = -1
    names: tuple[str, ...] = ()
    at: int | None = None
    for record in records:
        if record.names is not names:
            names = record.names
            at = names.index(name) if name in names else None
        rate = record.lr[place] if place < len(record.lr) else math.nan
        gradient = None if at is None else _norm(record, at)
        if not math.isfinite(rate) or gradient is None:
            continue
        # The largest element of a gradient lies between its root mean square and its norm.
        low = rate * gradient / math.sqrt(parameter.numel()) if plain else rate
        high = rate * gradient / (1 - min(kept, 0.99)) if plain else BOUND * rate
        reach = reach * max(1.0, abs(1 - rate * decay)) + high
        if first is None and low >= LARGE_UPDATE * usual:
            if plain and _is_outlier(gradient, rate, seen):
                return None
            first = record, rate, low
        elif first is None:
            seen.append((gradient, rate))
            seen_last = record.step
    if first is None:
        return None
    overflows = reach > 1e-3 * torch.finfo(parameter.dtype).max
    if now is None:
        now = math.inf if overflows else reach
    explained = now <= reach if math.isfinite(now) else overflows
    record, rate, low = first
    sane = max((r for _, r in seen), default=math.inf)
    before = (sane, seen_last) if rate > OUTLIER * sane else None
    found = Growth(name, start, now, record.step, rate, low, before)
    return found if explained and found.times >= GROWN else None


def _is_outlier(gradient: float, rate: float, seen: Sequence[tuple[float, float]]) -> bool:
    """Whether a gradient is far above those before it, at a rate that is not."""
    if not seen:
        return False
    return gradient > OUTLIER * max(g for g, _ in seen) and rate < OUTLIER * max(r for _, r in seen)


def _norm(record: StepRecord, at: int) -> float | None:
    """Return the norm of a parameter's gradient as the optimizer saw it, after clipping."""
    norm = record.norms[at] if at < len(record.norms) else ABSENT
    return None if norm == ABSENT or not math.isfinite(norm) else norm / record.clip


def _group_of(optimizer: Any, parameter: Tensor) -> int | None:
    groups = enumerate(optimizer.param_groups)
    return next((i for i, group in groups if any(p is parameter for p in group["params"])), None)


def _trained(model: nn.Module, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of the model that the optimizer trains, by name."""
    held = {id(p) for group in groups_of(optimizer) for p in group["params"]}
    for name, p in unwrap(model).named_parameters():
        value = local(p.detach())
        if id(p) in held and p.is_floating_point() and value.layout is torch.strided and value.numel() and not value.is_meta:
            yield clean_name(name), p


def _largest(parameter: Tensor) -> float:
    """Return the largest absolute weight. Waits for the device."""
    return float(torch.linalg.vector_norm(local(parameter.detach()), torch.inf))
