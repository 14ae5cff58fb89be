"""What is usual for this run: running statistics of loss and gradient norm, and what becomes of a spike.

The norm is taken on a logarithmic scale, and so is the loss, relative to its usual size: asinh(loss / size) is the logarithm
for large losses and linear around zero, which losses may cross. On these scales noise has about the same size all through a
run. `RunningStats` lives on the device, so that a verdict can use it without the host. It takes accepted, finite steps only,
and each at most as far from the mean as a few deviations: one NaN cannot blind it and one outlier cannot move it far.

`SpikeWatch` lives on the host and decides what a spike was. One large value proves nothing: the start of a new kind of
data looks the same. A spike is an incident when the steps after it are normal again (an outlier batch, dated to its
step) or when they keep growing (divergence). A new level that stays is neither.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from nanproof._records import StepRecord

MEAN_WINDOW = 20
"""Steps the running means remember, roughly: short, so that they follow a run that learns fast."""
SPREAD_WINDOW = 100
"""Steps the running deviations remember."""
CLAMP = 4.0
"""Deviations from the mean that one step can count for, or the least spike; also where `max_norm="auto"` clips."""
NEW_LEVEL = 10
"""Spikes in a row after which they are what is usual: the statistics start over."""
LEAST_SPIKE = (math.log(8.0), math.asinh(3.0) - math.asinh(1.0))
"""A spike is at least eight times the usual norm, or three times the usual loss."""
LONE_NORM = 30.0
"""Times the usual norm that make an outlier of a step whose loss was as usual."""
LEAST_CLIP = math.log(1.5)
"""`max_norm="auto"` never clips below this much above the usual norm."""
MOVED = math.log(2.0)
"""A loss alone is no spike, however far off, if the norm is not at least twice the usual: losses that are mostly 0 jump."""
SMALLEST_LOSS = 1e-12
"""A usual loss below this counts as this."""

Level: TypeAlias = tuple[float, float]
"""(log of the gradient norm, asinh of the loss over its usual size)"""


class RunningStats:
    """Running mean and deviation of the norm's and the loss's level, as device tensors.

    The deviation is that from one step to the next, divided by the square root of 2: the same as around a mean, but a
    trend does not count as noise.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, warmup: int, sensitivity: float) -> None:
        self.warmup = warmup
        self.sensitivity = sensitivity
        self.numbers = array("d" if dtype == torch.float64 else "f", (0.0,) * 9)
        """On a CPU, the memory of `state`: Python reads and writes it without an operation of torch."""
        on_cpu = device.type == "cpu"
        self.state = torch.frombuffer(self.numbers, dtype=dtype) if on_cpu else torch.zeros(9, device=device, dtype=dtype)
        """All of it end to end, as the kernel wants it; the rest are views."""
        self.count, self.streak, self.size = self.state[0], self.state[1], self.state[8]
        self.mean, self.spread, self.last = self.state[2:4], self.state[4:6], self.state[6:8]
        self._least_spike = torch.tensor(LEAST_SPIKE, device=device, dtype=dtype)
        self.tiny = torch.finfo(dtype).tiny
        self._nothing = math.log(self.tiny) + 0.01

    def point(self, total: Tensor, loss: Tensor) -> Tensor:
        """The levels of this step. A norm of exactly 0 counts as the smallest number."""
        log_norm = total.clamp(min=self.tiny).log()
        size = torch.where(self.count > 0, self.size, loss.abs()).clamp(min=SMALLEST_LOSS)
        return torch.stack((log_norm, torch.asinh(loss / size)))

    def is_spike(self, point: Tensor) -> Tensor:
        band = torch.maximum(self.spread * self.sensitivity, self._least_spike)
        above = point - self.mean
        norm_is_far, loss_is_far = (above > band).unbind()
        return (norm_is_far | (loss_is_far & (above[0] > MOVED))) & (self.count >= self.warmup)

    def auto_limit(self) -> Tensor:
        """The norm to clip to when `max_norm="auto"`; infinite until there is something to go by."""
        limit = (self.mean[0] + (self.spread[0] * CLAMP).clamp(min=LEAST_CLIP)).exp()
        return torch.where(self.count >= self.warmup, limit, torch.inf)

    def take(self, point: Tensor, loss: Tensor, spike: Tensor, accepted: Tensor) -> None:
        """Learn from a step if it was accepted. `where`, never a product: 0 times NaN is NaN.

        A spike that was refused counts towards a new level all the same; any other refused step leaves no trace. Nor does
        one whose gradients are all exactly 0, as in a group of equal rewards: it says nothing of what is usual.
        """
        accepted = accepted & (point[0] > self._nothing)
        self.streak.copy_(torch.where(spike, self.streak + 1, torch.where(accepted, 0, self.streak)))
        settled = self.streak < NEW_LEVEL
        for tensor in (self.count, self.streak, self.spread):
            tensor.mul_(settled)
        age = (self.count + 1).clamp(max=MEAN_WINDOW)
        bound = torch.where(self.count >= self.warmup, torch.maximum(self.spread * CLAMP, self._least_spike), torch.inf)
        gap = torch.where(accepted, torch.minimum(torch.maximum(point - self.mean, -bound), bound), 0)
        value = self.mean + gap
        change = torch.minimum((value - self.last).abs() / math.sqrt(2), bound)
        self.last.copy_(torch.where(accepted, value, self.last))
        self.mean.add_(gap / age)
        # The first step has no step before it to differ from.
        change = torch.where(accepted & (self.count > 0), change - self.spread, 0)
        self.spread.add_(change / self.count.clamp(min=1, max=SPREAD_WINDOW))
        size = torch.where(self.count > 0, torch.minimum(loss.abs(), 2 * self.size + SMALLEST_LOSS), loss.abs())
        self.size.add_(torch.where(accepted, size - self.size, 0) / age)
        self.count.add_(accepted)

    def state_dict(self) -> dict[str, Tensor]:
        return {"state": self.state.clone()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.state.copy_(state["state"])


@dataclass(frozen=True)
class Finding:
    """A spike that turned out to be something."""

    kind: str
    record: StepRecord
    message: str


@dataclass
class _Episode:
    """A jump, and what came after it."""

    record: StepRecord
    size: float
    """The usual size of the loss before it; levels are relative to that."""
    usual: Level
    spread: Level
    grows_by: float
    """How many times the loss of the jump a loss must reach for this to be divergence."""
    several_ranks: bool
    after: list[Level] = field(default_factory=list)

    @property
    def peak(self) -> Level:
        return self.level(self.record)

    @property
    def jumped(self) -> list[int]:
        """Which of norm and loss jumped: only those have to return."""
        return [i for i in (0, 1) if self.peak[i] - self.usual[i] > max(4 * self.spread[i], LEAST_SPIKE[i] / 2)]

    @property
    def remarkable(self) -> bool:
        """The loss was off too, or the norm by so much that it need not be: early in training norms jump tenfold anyway."""
        loss_seen = not self.several_ranks and 1 in self.jumped
        return loss_seen or self.peak[0] - self.usual[0] > math.log(LONE_NORM)

    def level(self, record: StepRecord) -> Level:
        """On several ranks only the norm is alike on all: it stands in for the loss."""
        norm = log_norm(record)
        return norm, norm if self.several_ranks else math.asinh(record.loss / self.size)

    def returned(self) -> int:
        """How many of the steps after it are nearer to the usual than to the peak."""
        return sum(all(2 * x[i] < self.usual[i] + self.peak[i] for i in self.jumped) for x in self.after)

    def has_grown(self, level: float) -> bool:
        return 1 in self.jumped and level - self.peak[1] > math.log(self.grows_by)

    def stayed_up(self, times: float) -> bool:
        """All but one of the last steps lie that many times above the usual; on several ranks that cannot be told."""
        last = self.after[-SpikeWatch.GROWTH :]
        return not self.several_ranks and sum(x[1] - self.usual[1] > math.log(times) for x in last) >= len(last) - 1

    def later(self) -> float:
        """The middle of the later half of the losses after it."""
        later = sorted(x[1] for x in self.after[len(self.after) // 2 :])
        return later[len(later) // 2]


class SpikeWatch:
    """Watches the steps after a jump, one at a time, and says what it was."""

    SETTLE = 4
    """Steps after which a spike is an outlier, if all but one of them returned."""
    GROWTH = 8
    """Steps after which a jump can be called divergence."""
    PATIENCE = 20
    """Steps after which a jump that did neither is a new level, and forgotten."""
    BLOWN_UP = 10.0
    """Times the run's first values: loss and norm both lie there when a run blows up before anything was usual."""
    NOTHING = 0.1
    """A loss below this has not blown up, however small it was at first."""
    FAR = 30.0
    """Times the run's first loss at which a run that blew up early and stays there has diverged, growing or not."""
    EARLY = 20
    """Steps within which that is looked for; afterwards there is something usual to compare with."""

    def __init__(self) -> None:
        self._first: list[Level] = []
        self._seen = 0
        self._episode: _Episode | None = None
        self._diverged = False

    def see(self, record: StepRecord, several_ranks: bool) -> Finding | None:
        """Take the next accepted step, in order. One without any gradient says nothing."""
        if record.grad_norm == 0:
            return None
        norm = log_norm(record)
        self._seen += 1
        if len(self._first) < 3:
            self._first.append((norm, abs(record.loss)))
        first_norm, first_loss = min(x[0] for x in self._first), min(x[1] for x in self._first)
        blown_up = norm - first_norm > math.log(self.BLOWN_UP)
        if not several_ranks:
            blown_up = blown_up and record.loss > max(self.BLOWN_UP * first_loss, self.NOTHING)
        self._diverged = self._diverged and blown_up
        if self._episode is not None:
            return self._judge(self._episode, self._episode.level(record))
        if record.spike:
            usual, spread = record.typical, record.spread
            if several_ranks:
                usual, spread = (usual[0], usual[0]), (spread[0], spread[0])
            size = max(record.loss_size, SMALLEST_LOSS)
            self._episode = _Episode(record, size, usual, spread, 3.0, several_ranks)
        elif blown_up and not self._diverged and self._seen <= self.EARLY:
            size = max(first_loss, self.NOTHING / self.BLOWN_UP)
            usual = (first_norm, first_norm if several_ranks else math.asinh(1.0))
            self._episode = _Episode(record, size, usual, (0.0, 0.0), 1.5, several_ranks)
        return None

    @property
    def settled(self) -> bool:
        """No jump is being watched, and the run has not diverged."""
        return self._episode is None and not self._diverged

    def cut_short(self) -> Finding | None:
        """The next step was non-finite. If the loss had been growing without end, that is what it was."""
        episode = self._episode
        self._episode = None
        if episode is None or not episode.after or not episode.has_grown(episode.after[-1][1]):
            return None
        return self._divergence(episode, episode.after[-1][1])

    def _judge(self, episode: _Episode, level: Level) -> Finding | None:
        episode.after.append(level)
        seen, spike = len(episode.after), episode.record
        if seen == self.SETTLE and spike.spike and episode.remarkable and episode.returned() >= self.SETTLE - 1:
            self._episode = None
            return Finding(
                "spike",
                spike,
                f"loss {spike.loss:.4g} and gradient norm {spike.grad_norm:.4g} where {spike.loss_size:.4g} and "
                f"{math.exp(spike.typical[0]):.4g} are usual; the next steps were normal again: an outlier batch",
            )
        if seen >= self.GROWTH and not self._diverged and episode.has_grown(episode.later()):
            return self._divergence(episode, episode.later())
        if seen >= self.GROWTH and not spike.spike and not self._diverged and episode.stayed_up(self.FAR):
            return self._divergence(episode, episode.later())
        if seen >= self.PATIENCE:
            self._episode = None
        return None

    def _divergence(self, episode: _Episode, now: float) -> Finding:
        self._episode, self._diverged = None, True
        what = "gradient norm" if episode.several_ranks else "loss"
        times = math.exp(min(now - episode.usual[1], 700))
        steps = len(episode.after)
        message = f"loss {episode.record.loss:.4g}, and growing: after {steps} steps the {what} is {times:.3g} times the usual"
        return Finding("divergence", episode.record, message)

    def state_dict(self) -> dict[str, Any]:
        """What must outlive a restart. A jump still being watched does not."""
        return {"first": list(self._first), "seen": self._seen, "diverged": self._diverged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._episode = None
        self._first = [(x[0], x[1]) for x in state["first"]]
        self._seen, self._diverged = state["seen"], state["diverged"]


def log_norm(record: StepRecord) -> float:
    return math.log(max(record.grad_norm, 1e-300))
