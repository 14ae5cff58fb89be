"""The last few steps, by reference: batches, random numbers, mode. What lets a step be run again after it was found bad."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import Tensor

from nanproof.core.support._context import Mode, RandomState
from nanproof.core.support._tree import all_tensors, tensors_in

LARGEST = 1 << 30
"""Bytes of batches that are kept alive, at the most; always one."""
KEPT = 8
"""Steps that are kept; more than it takes to tell what a spike was."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What one step was run on."""

    step: int
    batches: tuple[Any, ...]
    versions: tuple[int, ...]
    """How often each tensor of the batches had been written; torch counts that."""
    random: RandomState
    mode: Mode

    @property
    def changed(self) -> bool:
        """The batch was written in place since. Writes through NumPy are not seen."""
        return self.versions != _versions(self.batches)


class Recorder:
    """Keeps the last steps. Copies nothing; costs a few microseconds a step."""

    def __init__(self) -> None:
        self._moments: deque[Moment] = deque(maxlen=KEPT)

    def keep(self, step: int, batches: tuple[Any, ...], random: RandomState, mode: Mode) -> None:
        tensors = [t for batch in batches for t in all_tensors(batch)]
        size = sum([t.numel() * t.element_size() for t in tensors])
        size += sum([t.numel() * t.element_size() for t in self._held(batches)])
        versions = tuple([0 if t.is_inference() else t._version for t in tensors])
        self._moments.append(Moment(step, batches, versions, random, mode))
        while len(self._moments) > max(1, LARGEST // max(size, 1)):
            self._moments.popleft()

    def _held(self, batches: tuple[Any, ...]) -> list[Tensor]:
        """The tensors in objects that a batch refers to, of those that the step before did not refer to."""
        now = [value for batch in batches for value in _objects(batch)]
        if not now:
            return []
        before = [value for batch in (self._moments[-1].batches if self._moments else ()) for value in _objects(batch)]
        if len(now) == len(before) and all(map(is_, now, before)):
            return []
        known = set(map(id, before))
        new = [value for value in now if id(value) not in known]
        return [t for value in new for _, t in tensors_in(vars(value))]

    @property
    def last(self) -> int | None:
        """The newest step that is kept."""
        return self._moments[-1].step if self._moments else None

    def at(self, step: int) -> Moment | None:
        return next((m for m in reversed(self._moments) if m.step == step), None)

    def drop(self, step: int) -> None:
        """A refused step is not among the healthy ones."""
        self._moments = deque((m for m in self._moments if m.step != step), maxlen=KEPT)

    def __iter__(self) -> Iterator[Moment]:
        return iter(tuple(self._moments))

    def clear(self) -> None:
        self._moments.clear()


def _objects(batch: Any) -> list[Any]:
    found: list[Any] = getattr(batch, "objects", [])
    return found


def _versions(batches: tuple[Any, ...]) -> tuple[int, ...]:
    return tuple([0 if t.is_inference() else t._version for batch in batches for t in all_tensors(batch)])
