"""Curves and heat maps of runs of any length, in bounded memory: steps fall into buckets, and when there are too many of these,
each pair becomes one."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import Any

from nanproof._records import ABSENT

METRICS = ("loss", "grad_norm", "lr", "scale")
MOST_TERMS = 24
"""Terms of a loss that are kept: the first ones that came. More lines could not be told apart."""


@dataclass(slots=True)
class Extent:
    """What one metric was within a bucket."""

    low: float = math.inf
    high: float = -math.inf
    total: float = 0.0
    count: int = 0
    bad: int = 0
    """How many were NaN or Inf."""

    def add(self, x: float) -> None:
        if math.isfinite(x):
            self.low, self.high = min(self.low, x), max(self.high, x)
            self.total += x
            self.count += 1
        else:
            self.bad += 1

    def merge(self, other: Extent) -> None:
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.total += other.total
        self.count += other.count
        self.bad += other.bad

    @property
    def mean(self) -> float:
        if self.count and math.isinf(self.total):  # the sum of the largest numbers is none any more
            return self.low / 2 + self.high / 2
        return self.total / self.count if self.count else math.nan


@dataclass(slots=True)
class Bucket:
    """A few steps in a row."""

    start: int
    steps: int = 0
    skipped: int = 0
    clipped: int = 0
    metrics: tuple[Extent, ...] = field(default_factory=lambda: tuple(Extent() for _ in METRICS))
    terms: dict[str, Extent] = field(default_factory=dict)
    """By name: the terms of the loss, where the steps have any."""

    def merge(self, other: Bucket) -> None:
        self.start = min(self.start, other.start)
        self.steps += other.steps
        self.skipped += other.skipped
        self.clipped += other.clipped
        for mine, its in zip(self.metrics, other.metrics, strict=True):
            mine.merge(its)
        for name, extent in other.terms.items():
            if self.terms.setdefault(name, extent) is not extent:
                self.terms[name].merge(extent)


class Curves:
    """Loss, gradient norm, learning rate, loss scale and the terms of the loss by step: lowest, highest and mean of every bucket.
    Steps that come again, after going back, take the place of those that were given up."""

    def __init__(self, most: int = 2000) -> None:
        self.most = most
        self.width = 1
        """Steps a bucket."""
        self.terms: list[str] = []
        """Names of the terms, as they came."""
        self.more_terms = False
        """There were more of them than are kept."""
        self._buckets: dict[int, Bucket] = {}

    def add(self, step: int, values: Sequence[float | None], action: str, terms: Sequence[tuple[str, float]] = ()) -> None:
        """`values` in the order of `METRICS`; None where there is none."""
        place = step // self.width
        bucket = self._buckets.get(place)
        if bucket is None:
            if len(self._buckets) >= self.most:
                self._double()
                self.add(step, values, action, terms)
                return
            bucket = self._buckets[place] = Bucket(step)
        bucket.steps += 1
        bucket.skipped += action == "skipped"
        bucket.clipped += action == "clipped"
        for extent, x in zip(bucket.metrics, values, strict=True):
            if x is not None:
                extent.add(x)
        for name, x in terms:
            if self._keeps(name):
                bucket.terms.setdefault(name, Extent()).add(x)

    def _keeps(self, name: str) -> bool:
        if name in self.terms:
            return True
        if len(self.terms) >= MOST_TERMS:
            self.more_terms = True
            return False
        self.terms.append(name)
        return True

    def go_back(self, step: int) -> None:
        """What was taken from `step` on does not count any more. A bucket that begins before it keeps what is in it."""
        for place in [place for place, bucket in self._buckets.items() if bucket.start >= step]:
            del self._buckets[place]

    def _double(self) -> None:
        self.width *= 2
        old, self._buckets = self._buckets, {}
        for place, bucket in old.items():
            there = self._buckets.setdefault(place // 2, bucket)
            if there is not bucket:
                there.merge(bucket)

    def __len__(self) -> int:
        return len(self._buckets)

    def __iter__(self) -> Iterator[Bucket]:
        """Buckets by step."""
        return (self._buckets[place] for place in sorted(self._buckets))

    @property
    def steps(self) -> list[int]:
        """The first step of every bucket."""
        return [bucket.start for bucket in self]

    def low(self, metric: str) -> list[float]:
        """The lowest finite value of every bucket; NaN where there is none."""
        return [e.low if e.count else math.nan for e in self._extents(metric)]

    def high(self, metric: str) -> list[float]:
        return [e.high if e.count else math.nan for e in self._extents(metric)]

    def mean(self, metric: str) -> list[float]:
        return [e.mean for e in self._extents(metric)]

    def bad(self, metric: str) -> list[int]:
        """How many values of every bucket were NaN or Inf."""
        return [e.bad for e in self._extents(metric)]

    @property
    def skipped(self) -> list[int]:
        return [bucket.skipped for bucket in self]

    @property
    def clipped(self) -> list[int]:
        return [bucket.clipped for bucket in self]

    def _extents(self, metric: str) -> list[Extent]:
        i = METRICS.index(metric)
        return [bucket.metrics[i] for bucket in self]


class Heat:
    """The largest value of every name in every bucket of steps: `ABSENT` where there was none, Inf where one was NaN or Inf."""

    def __init__(self, most: int = 256) -> None:
        self.most = most
        self.width = 1
        """Steps a column."""
        self.names: list[str] = []
        self._columns: dict[int, array[float]] = {}
        self._given: tuple[str, ...] = ()
        self._order: list[int] | None = None

    def add(self, step: int, names: tuple[str, ...], values: Sequence[float | str | None]) -> None:
        """`values` as a line of JSON has them: null is absent, and what is not finite a string."""
        if names is not self._given:
            self._rename(names)
        row = _row(values)
        if len(row) != len(names):
            return  # a line that is not as it should be
        if self._order is not None:
            placed = array("d", [ABSENT]) * len(self.names)
            for i, x in zip(self._order, row, strict=True):
                placed[i] = x
            row = placed
        place = step // self.width
        if place not in self._columns and len(self._columns) >= self.most:
            self._double()
            place = step // self.width
        self._merge(place, row)

    def go_back(self, step: int) -> None:
        """Columns that begin at `step` or later do not count any more."""
        for place in [place for place in self._columns if place * self.width >= step]:
            del self._columns[place]

    def close_gaps(self) -> None:
        """Make columns wider while most of them are followed by a gap: of an old step the norms are kept only now and then."""
        while len(self._columns) > 2:
            places = sorted(self._columns)
            if 2 * sum(after - place > 1 for place, after in pairwise(places)) <= len(places):
                return
            self._double()

    @property
    def steps(self) -> list[int]:
        """Where every column begins."""
        return [place * self.width for place in sorted(self._columns)]

    @property
    def columns(self) -> list[array[float]]:
        """By step; each has a number for every name."""
        return [self._columns[place] for place in sorted(self._columns)]

    def _merge(self, place: int, row: array[float]) -> None:
        column = self._columns.get(place)
        self._columns[place] = row if column is None else array("d", map(max, column, row))

    def _double(self) -> None:
        self.width *= 2
        old, self._columns = self._columns, {}
        for place, column in old.items():
            self._merge(place // 2, column)

    def _rename(self, names: tuple[str, ...]) -> None:
        """A run resumed with other parameters: those that are new come after those that are known."""
        self._given = names
        known = {name: i for i, name in enumerate(self.names)}
        new = [name for name in dict.fromkeys(names) if name not in known]
        self.names += new
        for column in self._columns.values():
            column.extend(repeat(ABSENT, len(new)))
        places = {name: i for i, name in enumerate(self.names)}
        order = [places[name] for name in names]
        self._order = None if order == list(range(len(self.names))) else order


def _row(values: Any) -> array[float]:
    try:
        return array("d", values)
    except TypeError:
        return array("d", [ABSENT if x is None else _finite(float(x)) for x in values])


def _finite(x: float) -> float:
    return x if math.isfinite(x) else math.inf
