"""Small statistics of a curve that noise and single spikes do not move. No numpy: it may be missing where a log is read."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Rolling median over `window` neighbours, fewer at the ends."""
    half = max(window // 2, 1)
    return [median(values[max(0, i - half) : i + half + 1]) for i in range(len(values))]


def noise(values: Sequence[float], smoothed: Sequence[float]) -> float:
    """Standard deviation around the smoothed curve, as a normal distribution would have it."""
    if len(values) < 3:
        return 0.0
    return 1.4826 * median(abs(v - s) for v, s in zip(values, smoothed, strict=True))


def level(values: Sequence[float]) -> float:
    return median(values) if values else 0.0
