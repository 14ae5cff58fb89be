"""Curve: a metric of a run of any length in bounded memory. Points go into buckets; when there are too many, neighbours merge."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

BUCKETS = 2048
LARGEST = 1e100
"""What is larger is as good as Inf: float32 ends at 3e38, and sums of such numbers would overflow."""


def finite(value: float) -> bool:
    """A number that can be computed with; NaN is none."""
    return abs(value) < LARGEST


@dataclass(frozen=True, slots=True)
class Place:
    """Where in a run and in its log something stands."""

    order: int = 0
    """How many points of the run came before: for comparing places, also in logs that count no steps."""
    step: float | None = None
    epoch: float | None = None
    line: int = 0

    def __str__(self) -> str:
        parts = [] if self.step is None else [f"step {number(self.step)}"]
        if self.epoch is not None and self.step is None:
            parts.append(f"epoch {number(self.epoch)}")
        return ", ".join([*parts, f"line {self.line}"]) if self.line else ", ".join(parts) or "the start"


def number(value: float) -> str:
    """As short as it can be without losing what matters."""
    if not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else f"{value:.4g}"


@dataclass(slots=True)
class Bucket:
    """Neighbouring points. Means are of the finite ones."""

    place: Place
    """Of the last point."""
    last: float
    count: int
    finite: int
    total: float
    low: float
    high: float

    def add(self, value: float, place: Place) -> None:
        self.place, self.last = place, value
        self.count += 1
        if finite(value):
            self.finite += 1
            self.total += value
            self.low, self.high = min(self.low, value), max(self.high, value)

    def take(self, later: Bucket) -> None:
        """Hold what another one holds too."""
        self.place, self.last = later.place, later.last
        self.count, self.finite, self.total = self.count + later.count, self.finite + later.finite, self.total + later.total
        self.low, self.high = min(self.low, later.low), max(self.high, later.high)

    @property
    def mean(self) -> float:
        """NaN if there is no finite value."""
        return self.total / self.finite if self.finite else math.nan

    @property
    def shown(self) -> float:
        """What a picture shows: not a number if any of the values is not one."""
        return self.mean if self.finite == self.count else math.nan


class Curve:
    """Buckets in the order of the log, at most `BUCKETS`. Exact as long as there are no more points than that."""

    def __init__(self, most: int = BUCKETS) -> None:
        self.most = most
        self.each = 1
        """Points a bucket."""
        self.buckets: list[Bucket] = []

    def __len__(self) -> int:
        return len(self.buckets)

    def add(self, value: float, place: Place) -> None:
        if self.buckets and self.buckets[-1].count < self.each:
            self.buckets[-1].add(value, place)
            return
        if len(self.buckets) >= self.most:
            self._halve()
            self.add(value, place)
            return
        self.buckets.append(Bucket(place, value, 0, 0, 0.0, math.inf, -math.inf))
        self.buckets[-1].add(value, place)

    def extend(self, values: Sequence[float], place: Callable[[int], Place]) -> None:
        """Add finite values, the i-th of which stands at `place(i)`: the buckets of `add`, sums equal to rounding."""
        done = 0
        while done < len(values):
            if not self.buckets or self.buckets[-1].count >= self.each:
                if len(self.buckets) >= self.most:
                    self._halve()
                    continue
                self.buckets.append(Bucket(Place(), 0.0, 0, 0, 0.0, math.inf, -math.inf))
            bucket = self.buckets[-1]
            part = values[done : done + self.each - bucket.count]
            done += len(part)
            bucket.place, bucket.last = place(done - 1), part[-1]
            bucket.count += len(part)
            bucket.finite += len(part)
            bucket.total = sum(part, bucket.total)
            bucket.low, bucket.high = min(bucket.low, min(part)), max(bucket.high, max(part))

    def _halve(self) -> None:
        """Neighbours merge; a last one without a neighbour has room for more."""
        for left, right in zip(self.buckets[::2], self.buckets[1::2], strict=False):
            left.take(right)
        self.buckets = self.buckets[::2]
        self.each *= 2

    def finite(self, before: int | None = None) -> list[Bucket]:
        """Buckets that hold a number, up to a place."""
        return [b for b in self.buckets if b.finite and (before is None or b.place.order < before)]
