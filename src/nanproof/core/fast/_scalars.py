"""The verdict on a CPU, in Python's own numbers: a few microseconds, where a hundred operations on tensors of one element take
a hundred.

It computes what `verdict.judge` and `RunningStats.take` compute in tensors, which is the reference it is tested against. It
rounds once, at the end; the reference after each operation.
"""

from __future__ import annotations

import math
from array import array

import torch
from torch import Tensor

from nanproof.core.judge._stats import (
    CLAMP,
    LEAST_CLIP,
    LEAST_SPIKE,
    MEAN_WINDOW,
    MOVED,
    NEW_LEVEL,
    SMALLEST_LOSS,
    SPREAD_WINDOW,
    RunningStats,
)
from nanproof.core.judge._verdict import Verdict

_ROOT = math.sqrt(2)
_LARGEST_LOG = 700.0
"""What `math.exp` still takes."""


class Scalars:
    """Takes the place of `Kernels` where the device is the CPU."""

    def __init__(self) -> None:
        # Users set other default dtypes and devices; the fused kernels read fp32.
        self._flags = [torch.full((), flag, dtype=torch.float32, device="cpu") for flag in (0.0, 1.0)]

    def norms(self, gradients: list[Tensor]) -> Tensor | None:
        """Nothing here is faster than torch."""
        return None

    def judge(
        self,
        loss: Tensor,
        norms: Tensor,
        also_finite: Tensor | None,
        bad_buffer: Tensor | None,
        loss_decides: bool,
        max_norm: float | str | None,
        stats: RunningStats,
        skip_spikes: bool,
        latch: Tensor | None,
    ) -> Verdict:
        """`verdict.judge`, the statistics' `take` and the latch."""
        level = _Level(stats)
        total, own = float(torch.linalg.vector_norm(norms)), float(loss)
        place = 0.0 if bad_buffer is None else float(bad_buffer)
        finite = math.isfinite(total)
        if loss_decides:
            finite = finite and math.isfinite(own) and not place and (also_finite is None or math.isfinite(float(also_finite)))
        held = latch is not None and float(latch) > 0
        judged = own if loss_decides else 0.0
        point = level.point(total, judged) if finite else (0.0, 0.0)
        spike = finite and not held and level.is_spike(point)
        bad = not finite or (skip_spikes and spike)
        clip = 1.0
        if max_norm is not None:
            limit = level.auto_limit() if isinstance(max_norm, str) else max_norm
            clip = (total + 1e-6) / limit if limit else (total + 1e-6) * math.inf
            clip = clip if clip > 1 else 1.0
        head = (own, total, clip, bad, spike, 0.0, place, 0.0, *level.mean, *level.spread, level.size, held)
        skip = bad or held
        if finite:
            level.take(point, judged, spike, accepted=not skip)
        if latch is not None:
            latch.fill_(skip)
        return Verdict(
            skip=self._flags[skip],
            divisor=torch.tensor(clip, dtype=torch.float32, device="cpu") if clip > 1 else None,
            packed=torch.cat((torch.frombuffer(array(stats.numbers.typecode, head), dtype=norms.dtype), norms)),
        )


class _Level:
    """What is usual for the run, as `RunningStats` holds it."""

    def __init__(self, stats: RunningStats) -> None:
        self._numbers = stats.numbers
        self.count, self.streak, mean_norm, mean_loss, spread_norm, spread_loss, last_norm, last_loss, self.size = stats.numbers
        self.mean, self.spread, self.last = (mean_norm, mean_loss), (spread_norm, spread_loss), (last_norm, last_loss)
        self._tiny, self._warmup, self._sensitivity = stats.tiny, stats.warmup, stats.sensitivity

    def point(self, total: float, loss: float) -> tuple[float, float]:
        size = max(self.size if self.count > 0 else abs(loss), SMALLEST_LOSS)
        return math.log(max(total, self._tiny)), math.asinh(loss / size)

    def is_spike(self, point: tuple[float, float]) -> bool:
        if self.count < self._warmup:
            return False
        above = point[0] - self.mean[0]
        if above > max(self.spread[0] * self._sensitivity, LEAST_SPIKE[0]):
            return True
        return above > MOVED and point[1] - self.mean[1] > max(self.spread[1] * self._sensitivity, LEAST_SPIKE[1])

    def auto_limit(self) -> float:
        if self.count < self._warmup:
            return math.inf
        return math.exp(min(self.mean[0] + max(self.spread[0] * CLAMP, LEAST_CLIP), _LARGEST_LOG))

    def take(self, point: tuple[float, float], loss: float, spike: bool, accepted: bool) -> None:
        """Learn from a step with a finite norm and loss."""
        accepted = accepted and point[0] > math.log(self._tiny) + 0.01
        streak = self.streak + 1 if spike else 0.0 if accepted else self.streak
        count, spreads = self.count, self.spread
        if streak >= NEW_LEVEL:
            count, streak, spreads = 0.0, 0.0, (0.0, 0.0)
        if not accepted:
            self._write(count, streak, *self.mean, *spreads, *self.last, self.size)
            return
        warm = count >= self._warmup
        age, span = min(count + 1, MEAN_WINDOW), min(max(count, 1), SPREAD_WINDOW)
        mean_norm, spread_norm, last_norm = _learn(
            point[0], self.mean[0], spreads[0], self.last[0], LEAST_SPIKE[0], warm, age, span
        )
        mean_loss, spread_loss, last_loss = _learn(
            point[1], self.mean[1], spreads[1], self.last[1], LEAST_SPIKE[1], warm, age, span
        )
        if not count:  # the first step has no step before it to differ from
            spread_norm, spread_loss = spreads
        seen = min(abs(loss), 2 * self.size + SMALLEST_LOSS) if count else abs(loss)
        size = self.size + (seen - self.size) / age
        self._write(count + 1, streak, mean_norm, mean_loss, spread_norm, spread_loss, last_norm, last_loss, size)

    def _write(self, *numbers: float) -> None:
        self._numbers[:] = array(self._numbers.typecode, numbers)


def _learn(
    x: float, mean: float, spread: float, last: float, least: float, warm: bool, age: float, span: float
) -> tuple[float, float, float]:
    """One coordinate of `RunningStats.take`: the new mean, spread and last value."""
    bound = max(spread * CLAMP, least) if warm else math.inf
    gap = min(max(x - mean, -bound), bound)
    change = min(abs(mean + gap - last) / _ROOT, bound)
    return mean + gap / age, spread + (change - spread) / span, mean + gap
