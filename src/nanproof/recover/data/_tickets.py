"""What is known about a batch that was handed out: its place, and the samples in it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample: its index in a map-style dataset, or its ordinal among what a worker reads of an iterable one."""

    index: int | None
    hash: str | None
    worker: int | None = None
    workers: int | None = None


class Ticket:
    """One batch that was handed out. Not changed after it is made.

    `samples` may also be given as bare indices, or as a function. They become `Sample`s when somebody asks, which hardly ever
    happens.
    """

    __slots__ = ("_samples", "batch", "epoch")

    def __init__(self, epoch: int, batch: int, samples: Sequence[Any] | Callable[[], tuple[Sample, ...]] | None) -> None:
        self.epoch = epoch
        self.batch = batch
        """Its place in the epoch's order, counting those that were left out or stepped over."""
        self._samples = samples

    @property
    def samples(self) -> tuple[Sample, ...] | None:
        """In the order of the batch's rows; None where it cannot be told."""
        if self._samples is None:
            return None
        given = self._samples() if callable(self._samples) else self._samples
        made = tuple(s if isinstance(s, Sample) else Sample(place(s), None) for s in given)
        self._samples = made
        return made

    @property
    def key(self) -> tuple[int, int]:
        return (self.epoch, self.batch)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ticket) and self.key == other.key and self.samples == other.samples

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Ticket(epoch={self.epoch}, batch={self.batch}, samples={self.samples})"


def place(index: Any) -> int | None:
    """A sampler may also give NumPy integers, tensors of one element, or keys that are no numbers."""
    if type(index) is int:
        return index
    try:
        return operator.index(index)
    except (TypeError, ValueError, RuntimeError):
        return None
