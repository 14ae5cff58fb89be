"""Small statistics of a curve that noise and single spikes do not move. No numpy: it may be missing where a log is read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import median


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
