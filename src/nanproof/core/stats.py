"""What is usual for this run: running statistics of loss and gradient norm, and what becomes of a spike.

`RunningStats` lives on the device, so that a verdict can use it without the host. It takes accepted, finite steps only,
and each at most as far from the mean as a few deviations: one NaN cannot blind it and one outlier cannot move it far.

`SpikeWatch` lives on the host and decides what a spike was. One large value proves nothing: the start of a new kind of
data looks the same. A spike is an incident when the steps after it are normal again (an outlier batch, dated to its
step) or when they keep growing (divergence). A new level that stays is neither.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from nanproof.records import StepRecord

WINDOW = 100
"""Steps the running statistics remember, roughly."""
CLAMP = 4.0
"""Deviations from the mean that one step can count for; also where `max_norm="auto"` clips."""
NEW_LEVEL = 10
"""Spikes in a row after which they are what is usual: the statistics start over."""
Level: TypeAlias = tuple[float, float]
_LEAST_NORM_SPIKE = math.log(4.0)
_LEAST_AUTO_CLIP = math.log(1.5)


class RunningStats:
    """Running mean and mean absolute deviation of (log of the gradient norm, loss), as device tensors."""

    def __init__(self, device: torch.device, dtype: torch.dtype, warmup: int, sensitivity: float) -> None:
        self.warmup = warmup
        self.sensitivity = sensitivity
        self.count = torch.zeros((), device=device, dtype=dtype)
        self.streak = torch.zeros((), device=device, dtype=dtype)
        self.mean = torch.zeros(2, device=device, dtype=dtype)
        self.spread = torch.zeros(2, device=device, dtype=dtype)
        # A spike is at least 4 times the usual norm, or half as much again as the usual loss.
        self._floor = torch.tensor([_LEAST_NORM_SPIKE, 1e-6], device=device, dtype=dtype)
        self._floor_by_mean = torch.tensor([0.0, 0.5], device=device, dtype=dtype)
        self._tiny = torch.finfo(dtype).tiny

    def point(self, total: Tensor, loss: Tensor) -> Tensor:
        """Where this step lies; a norm of exactly 0 counts as the smallest number."""
        return torch.stack((total.clamp(min=self._tiny).log(), loss))

    def is_spike(self, point: Tensor) -> Tensor:
        floor = torch.addcmul(self._floor, self._floor_by_mean, self.mean.abs())
        band = torch.maximum(self.spread * self.sensitivity, floor)
        return (point - self.mean > band).any() & (self.count >= self.warmup)

    def auto_limit(self) -> Tensor:
        """The norm to clip to when `max_norm="auto"`; infinite until there is something to go by."""
        limit = (self.mean[0] + (self.spread[0] * CLAMP).clamp(min=_LEAST_AUTO_CLIP)).exp()
        return torch.where(self.count >= self.warmup, limit, torch.inf)

    def take(self, point: Tensor, spike: Tensor, accepted: Tensor) -> None:
        """Learn from a step if it was accepted. `where`, never a product: 0 times NaN is NaN.

        A spike that was refused counts towards a new level all the same; any other refused step leaves no trace.
        """
        self.streak.copy_(torch.where(spike, self.streak + 1, torch.where(accepted, 0, self.streak)))
        settled = self.streak < NEW_LEVEL
        self.count.mul_(settled)
        self.spread.mul_(settled)
        self.streak.mul_(settled)
        rate = (self.count + 1).reciprocal().clamp(min=1 / WINDOW)
        gap = point - self.mean
        bound = torch.where(self.count >= self.warmup, self.spread * CLAMP + self._floor * 0.1, torch.inf)
        gap = torch.where(accepted, torch.minimum(torch.maximum(gap, -bound), bound), 0)
        # The first step sets the mean; its gap from nothing is no deviation.
        deviation = torch.where(accepted & (self.count > 0), gap.abs() - self.spread, 0)
        self.mean.add_(gap * rate)
        self.spread.add_(deviation * rate)
        self.count.add_(accepted)

    def state_dict(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).clone() for name in ("count", "streak", "mean", "spread")}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, value in state.items():
            getattr(self, name).copy_(value)


@dataclass(frozen=True)
class Finding:
    """A spike that turned out to be something."""

    kind: str
    record: StepRecord
    message: str


@dataclass
class _Episode:
    """A jump, and what came after it. A level is (log of the gradient norm, loss)."""

    record: StepRecord
    peak: Level
    usual: Level
    spread: Level
    grows_by: float
    """How many times further from the usual the loss must go for this to be divergence."""
    after: list[Level] = field(default_factory=list)

    @property
    def jump(self) -> Level:
        return self.peak[0] - self.usual[0], self.peak[1] - self.usual[1]

    @property
    def jumped(self) -> list[int]:
        """Which of norm and loss jumped: only those have to return."""
        return [i for i in (0, 1) if self.jump[i] > 4 * self.spread[i]]

    def returned(self) -> int:
        """How many of the steps after it are nearer to the usual than to the peak."""
        return sum(all(x[i] - self.usual[i] < self.jump[i] / 2 for i in self.jumped) for x in self.after)

    def grew_to(self) -> float | None:
        """The loss it has grown to, if it is much further off than at the jump."""
        later = sorted(x[1] for x in self.after[len(self.after) // 2 :])
        middle = later[len(later) // 2]
        return middle if 1 in self.jumped and middle - self.usual[1] > self.grows_by * self.jump[1] else None


class SpikeWatch:
    """Watches the steps after a jump, one at a time, and says what it was."""

    SETTLE = 4
    """Steps after which a spike is an outlier, if all but one of them returned."""
    GROWTH = 8
    """Steps after which a jump can be called divergence."""
    PATIENCE = 20
    """Steps after which a jump that did neither is a new level, and forgotten."""
    BLOWN_UP = 10.0
    """Times the run's first values, or times 0.01: loss and norm both lie there when a run blows up at once."""
    EARLY = 20
    """Steps within which that is looked for; afterwards there is something usual to compare with."""

    def __init__(self) -> None:
        self._first: list[Level] = []
        self._seen = 0
        self._episode: _Episode | None = None
        self._diverged = False

    def see(self, record: StepRecord, several_ranks: bool) -> Finding | None:
        """Take the next accepted step, in order. On several ranks only the norm is alike on all: it stands in for the loss."""
        log_norm = math.log(max(record.grad_norm, 1e-300))
        level, usual, spread = (log_norm, record.loss), record.typical, record.spread
        if several_ranks:
            usual_norm = math.exp(usual[0])
            level, usual, spread = (log_norm, record.grad_norm), (usual[0], usual_norm), (spread[0], spread[0] * usual_norm)
        self._seen += 1
        if len(self._first) < 3:
            self._first.append(level)
        start = min(x[0] for x in self._first), min((x[1] for x in self._first), key=abs)
        blown_up = level[0] - start[0] > math.log(self.BLOWN_UP) and level[1] > self.BLOWN_UP * max(abs(start[1]), 0.01)
        self._diverged = self._diverged and blown_up
        if self._episode is not None:
            return self._judge(self._episode, level)
        if record.spike:
            self._episode = _Episode(record, level, usual, spread, grows_by=3.0)
        elif blown_up and not self._diverged and self._seen <= self.EARLY:
            self._episode = _Episode(record, level, start, (0.0, 0.0), grows_by=1.5)
        return None

    def _judge(self, episode: _Episode, level: Level) -> Finding | None:
        episode.after.append(level)
        seen, spike = len(episode.after), episode.record
        if seen == self.SETTLE and episode.returned() >= self.SETTLE - 1:
            self._episode = None
            return Finding(
                "spike",
                spike,
                f"loss {spike.loss:.4g} and gradient norm {spike.grad_norm:.4g} where {episode.usual[1]:.4g} and "
                f"{math.exp(episode.usual[0]):.4g} are usual; the next steps were normal again: an outlier batch",
            )
        grown = episode.grew_to() if seen >= self.GROWTH and not self._diverged else None
        if grown is not None:
            self._episode, self._diverged = None, True
            message = (
                f"jumped from {episode.usual[1]:.4g} to {episode.peak[1]:.4g} and kept growing, to {grown:.4g} after {seen} steps"
            )
            return Finding("divergence", spike, message)
        if seen >= self.PATIENCE:
            self._episode = None
        return None

    def state_dict(self) -> dict[str, Any]:
        """What must outlive a restart. A jump still being watched does not."""
        return {"first": list(self._first), "seen": self._seen, "diverged": self._diverged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._episode = None
        self._first = [(x[0], x[1]) for x in state["first"]]
        self._seen, self._diverged = state["seen"], state["diverged"]
