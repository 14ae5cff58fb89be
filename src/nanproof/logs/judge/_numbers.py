"""Small statistics of a curve that noise and single spikes do not move. No numpy: it may be missing where a log is read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median

from nanproof.logs._curve import Bucket
from nanproof.logs._story import Segment

NEAR = 8
"""How many of the last points may belong to the end of a run."""
ABSURD = 1e8
"""Few losses are this large."""
BLOWN = 1e4
"""A loss that is this many times the usual one has exploded, where the run is lost right after it."""
HOPELESS = 1e12
"""A loss that is this many times the usual one is not a loss."""


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Rolling median over `window` neighbours, fewer at the ends."""
    half = max(window // 2, 1)
    return [median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def noise(values: Sequence[float]) -> float:
    """Standard deviation around the curve, from the differences of neighbours: a trend hardly adds to them, and the largest
    tenth, where a curve jumps, is left out. Tails that are heavier than a normal distribution's count."""
    apart = sorted(abs(b - a) for a, b in pairwise(values))
    kept = apart[: max(len(apart) * 9 // 10, 2)]
    return 1.1 * sum(kept) / len(kept) if kept else 0.0


def level(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


def learns(buckets: Sequence[Bucket]) -> bool:
    """Whether values fall by more than their noise. Of a few lines, the last has to be the lowest."""
    values = [b.mean for b in buckets]
    third = len(values) // 3
    if third < 2:
        return len(values) > 1 and values[-1] == min(values) < values[0] - 0.05 * abs(values[0])
    spread = max(values[-third:]) - min(values[-third:])
    return level(values[:third]) - level(values[-third:]) > max(0.02 * abs(level(values[:third])), 0.5 * spread)


def loss_falls(segment: Segment) -> bool:
    """Whether the training loss falls: then what looks odd beside it does no harm."""
    return learns(segment.track("loss").curve.finite())


def is_sum(values: Sequence[float]) -> bool:
    """Whether values grow by about the same each time, as a sum does that is never reset."""
    steps = [b - a for a, b in pairwise(values)]
    return len(steps) > 2 and min(steps) > 0 and max(steps) < 1.5 * min(steps)


def fills(values: Sequence[float]) -> bool:
    """Whether values rise from the first on, ever more slowly, and not in one step: a queue or a buffer is filling."""
    half = values[len(values) // 2]
    whole = max(values) - values[0]
    gradual = max((b - a for a, b in pairwise(values)), default=0.0) < 0.5 * whole
    return min(values) == values[0] and gradual and half - values[0] > 0.65 * whole


def largest(bucket: Bucket) -> float:
    """Return the value that is farthest from 0."""
    return bucket.low if -bucket.low > bucket.high else bucket.high


def blown(buckets: Sequence[Bucket]) -> Bucket | None:
    """Return the first of the last few with a value that is out of all proportion, such as 5e7 among losses near 100."""
    near = buckets[-NEAR:]
    sizes = [abs(largest(bucket)) for bucket in near]
    usual = sorted(sizes)[len(sizes) // 4] if sizes else 0.0
    most = ABSURD if usual >= ABSURD else BLOWN * max(usual, 1.0)
    return next((bucket for bucket, size in zip(near, sizes, strict=True) if size >= most), None)


def impossible(buckets: Sequence[Bucket]) -> Bucket | None:
    """Return the first with a value that no loss like the others can have, such as 1e34 among losses near 60."""
    sizes = [abs(largest(bucket)) for bucket in buckets]
    usual = max(level(sizes), 1.0)
    return next((bucket for bucket, size in zip(buckets, sizes, strict=True) if size > HOPELESS * usual), None)
