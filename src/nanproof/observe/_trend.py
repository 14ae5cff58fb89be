"""Straight lines through the last steps, for many series at once: how fast each grows, how well a line fits, and whether the
growth is slowing down. Logarithms to base 2, so a slope of 1 is a doubling a step."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

WINDOWS = (16, 32, 64, 128, 256)
"""Steps a line is put through. A slow growth shows in a long one, a fast one in a short one."""


@dataclass(frozen=True, slots=True)
class Fit:
    """A line through each series, over one window."""

    window: int
    slope: Tensor
    end: Tensor
    """Where the line is at the last step."""
    error: Tensor
    """Standard error of the slope. Neighbouring steps are alike, so it is taken for half as many."""
    noise: Tensor
    """Deviation of the series from the line."""
    fits: Tensor
    """Share of the variation that the line explains."""
    late: Tensor
    """Slope over the second half."""

    @property
    def rise(self) -> Tensor:
        """Over the window."""
        return self.slope * (self.window - 1)

    def first(self, count: int) -> Fit:
        """The first of the series."""
        parts = (self.slope, self.end, self.error, self.noise, self.fits, self.late)
        return Fit(self.window, *(part[:count] for part in parts))


class Series:
    """The last steps of many series. A step with something non-finite or absent in a series leaves no line through it. Nothing is
    computed before lines are asked for."""

    def __init__(self) -> None:
        self._steps: deque[Sequence[float]] = deque(maxlen=WINDOWS[-1])

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, values: Sequence[float]) -> None:
        self._steps.append(values)

    def clear(self) -> None:
        self._steps.clear()

    def values(self) -> Tensor:
        """(step, series)"""
        return torch.tensor(list(self._steps), dtype=torch.float64)


def lines(values: Tensor) -> list[Fit]:
    """Lines over every window that the steps fill."""
    return [fit(values[-window:]) for window in WINDOWS if window <= values.shape[0]]


def fit(values: Tensor) -> Fit:
    """Least squares. (step, series)"""
    window = values.shape[0]
    slope, mean, width = _slope(values)
    total = (values - mean).square().sum(0)
    left = (total - slope.square() * width).clamp(min=0)
    noise = (left / max(1, window - 2)).sqrt()
    late, _, _ = _slope(values[window // 2 :])
    return Fit(
        window=window,
        slope=slope,
        end=mean + slope * (window - 1) / 2,
        error=noise * (2 / width) ** 0.5,
        noise=noise,
        fits=torch.where(total > 0, 1 - left / total.clamp(min=1e-300), 0),
        late=late,
    )


def _slope(values: Tensor) -> tuple[Tensor, Tensor, float]:
    steps = values.shape[0]
    x = torch.arange(steps, dtype=values.dtype) - (steps - 1) / 2
    width = float(x.square().sum())
    return x @ values / width, values.mean(0), width
