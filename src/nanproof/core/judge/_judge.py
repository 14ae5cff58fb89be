"""Judge: the device side of a step, as the engine sees it.

Losses are noted, then `step` judges the gradients, lets the optimizer act on the verdict, and
returns a report for the host to read later. `Stepper` does that for torch's optimizers; the adapter
for DeepSpeed has a judge of its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from nanproof._policy import Policy
from nanproof.core._counters import Counters
from nanproof.core._evidence import Gradients
from nanproof.core.judge._copies import WeightKeeper
from nanproof.core.judge._keepers import BufferKeeper
from nanproof.core.judge._parameters import Parameters, unwrap
from nanproof.core.judge._scaling import LossScale
from nanproof.core.judge._stats import RunningStats
from nanproof.core.judge._terms import Terms, terms_of
from nanproof.core.judge._verdict import Reading
from nanproof.core.support._environment import about
from nanproof.core.support._ranks import Ranks

_version = attrgetter("_version")

MaxNorm: TypeAlias = "float | str | Mapping[Any, float | None] | None"
"""What gradients are clipped to: a norm, "auto", nothing, or of several optimizers each to its own."""


@dataclass(slots=True)
class Report:
    """What a step left for the host to read when the device has got that far."""

    loss: Tensor
    total: Tensor
    """The norm of all gradients, before clipping."""
    losses: list[Tensor]
    """One scalar a backward, of this rank."""
    probes: list[Tensor]
    """The norm of one early gradient after each backward, before any reduction over ranks."""
    names: tuple[str, ...]
    present: list[int]
    """Indices of the parameters that had a gradient."""
    lr: tuple[float | Tensor, ...]
    read: Callable[[], Reading]
    terms: list[Terms | None]
    """Of each loss, on the device; of the loss given to the step where none was noted before."""
    settings: tuple[str, ...] = ()
    """Settings of the optimizer that are non-finite, in words."""


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of gradients that were read before their step, so that no gradient is read twice."""

    values: Tensor
    """Of each gradient that is there, in the order of the parameters, before any clipping."""
    gradients: Sequence[Tensor]
    versions: list[int]
    """How often each gradient had been written by then."""
    clipped: bool = False
    """The loop has clipped since: the step does not clip again."""
    max_norm: float | None = None
    """What it clipped to; None where that was not one norm over all gradients."""

    @classmethod
    def of(cls, values: Tensor, gradients: Sequence[Tensor], **clipping: Any) -> Norms:
        """The norms of gradients as they are now."""
        return cls(values, gradients, list(map(_version, gradients)), **clipping)

    def hold_for(self, gradients: Sequence[Tensor]) -> bool:
        """Whether these are the same gradients, and nobody has written into them since."""
        if len(gradients) != len(self.gradients):
            return False
        return all(map(is_, gradients, self.gradients)) and list(map(_version, gradients)) == self.versions

    def rewritten(self, norms: Sequence[float]) -> bool:
        """Whether gradients with these norms are others. Norms that are all off by one power of two are not: a loss scale, or a
        mean over micro-batches, has been divided out. Waits for the device."""
        ratios = [b / a for a, b in zip(self.values.tolist(), norms, strict=True) if math.isfinite(a) and math.isfinite(b) and a]
        if not ratios or not min(ratios) > 0:
            return any(ratio <= 0 for ratio in ratios)
        power = 2.0 ** round(math.log2(ratios[0]))
        return any(abs(ratio / power - 1) > 1e-3 for ratio in ratios)

    @property
    def total(self) -> Tensor:
        """The norm of all gradients, with the loss scale in it."""
        norm: Tensor = torch.linalg.vector_norm(self.values)
        return norm


class Judge(ABC):
    """Owns what is on the device: norms, verdict, optimizer, kept state, running statistics, loss
    scale."""

    parameters: Parameters
    ranks: Ranks
    stats: RunningStats
    buffers: BufferKeeper
    scale: LossScale | None = None
    weights: WeightKeeper | None = None
    uncleared = False
    """In a loop of the user's own: backward added to the gradients of the step before."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        max_norm: MaxNorm,
        policy: Policy,
        counters: list[Counters] | None = None,
    ) -> None:
        self.model, self.optimizer, self.max_norm, self.policy = model, optimizer, max_norm, policy
        self.counters = counters if counters is not None else []
        """What the loop counts itself; asked at every step."""
        self.noted: list[tuple[Tensor, Terms | None]] = []
        """The loss of each backward since the last step, with its terms where it has some."""

    @property
    @abstractmethod
    def path(self) -> str:
        """ "device", perhaps with a note, or "host: " and why the verdict has to be read on the
        host each step."""

    @property
    def path_note(self) -> str:
        """Why the verdict is read where it is, if there is more to say than that."""
        return ""

    @property
    def on_device(self) -> bool:
        """Whether the verdict stays on the device."""
        return False

    @property
    def lag(self) -> int:
        """Steps between a verdict and its record."""
        return 0

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled."""
        return self.scale is not None

    @property
    def calibrates(self) -> bool:
        """Whether an overflow may only be the loss scale finding its level."""
        return self.scale is not None and not self.scale.fixed

    def calibrates_at(self, reading: Reading) -> bool:
        """Whether an overflow of a step that cannot be run again is taken for the loss scale
        finding its level."""
        return reading.scale is not None and reading.scale >= 1

    def own_reading(self, reading: Reading, report: Report) -> Reading:
        """The reading with this rank's own loss in it, where the loss that was judged is that of all ranks."""
        return reading

    def about(self) -> dict[str, Any]:
        """Describe the run for the first line of its journal."""
        return about(
            unwrap(self.model),
            self.optimizer,
            self.policy,
            path=self.path,
            max_norm=", ".join(f"{type(k).__name__} {v}" for k, v in self.max_norm.items())
            if isinstance(self.max_norm, Mapping)
            else self.max_norm,
            ranks=self.ranks.world,
            scaled=self.scaled,
        )

    # -- losses ------------------------------------------------------------------------------------

    def note_loss(self, loss: Tensor) -> Tensor | None:
        """Before a backward that somebody else does: note its loss. Returns what it has to start
        from on several ranks."""
        self.noted.append((loss.detach().reshape(()), terms_of(loss)))
        return None

    def drop_loss(self) -> None:
        """The backward whose loss was noted last was another optimizer's business."""
        if self.noted:
            self.noted.pop()

    def forget_losses(self) -> None:
        """The backwards so far will not be stepped on."""
        self.noted = []

    def loss_is_bad(self) -> bool:
        """Whether one of the losses since the last step is non-finite. Waits: for failures."""
        return any(not bool(torch.isfinite(loss).all()) for loss, _ in self.noted)

    # -- a step ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A step begins: keep what its forward and backward may write."""
        self.buffers.begin()

    def restore(self) -> None:
        """Put back what a step that is not taken has written."""
        self.buffers.restore()

    @abstractmethod
    def step(
        self,
        loss: Tensor | None,
        again: bool,
        norms: Norms | None = None,
        acting: Sequence[Any] | None = None,
        closure: Any = None,
    ) -> Report:
        """Judge the gradients and let the optimizer act on the verdict. `again`: the step can be run
        again. `acting`: of several optimizers, those that act now, the others with `act`. `closure`:
        how an optimizer evaluates the loss again."""

    def act(self, member: Any) -> None:  # noqa: B027
        """Let another one of several optimizers act on the last verdict."""

    def norms(self) -> Norms | None:
        """Read the norms of the gradients now; None if they can be read only with the step."""
        return None

    @abstractmethod
    def broken_state(self) -> list[str]:
        """Names of non-finite weights, buffers and optimizer states. Waits; for failures and the
        end."""

    @abstractmethod
    def look_at_gradients(self, present: Sequence[int]) -> Gradients:
        """Every element of the gradients of the step. Waits; for failures only."""

    def backward(self, loss: Tensor, scaled: bool = True) -> None:
        """Backward, scaled if there is a scaler; on several ranks seeded so that a bad loss reaches
        the others."""
        loss.backward(gradient=self.note_loss(loss))

    def forget(self) -> None:
        """Clear gradients and what was noted of backwards since the last step."""
        self.forget_losses()

    def forget_probes(self) -> None:  # noqa: B027
        """Forget what replays left behind."""

    def release(self) -> None:  # noqa: B027
        """The host has dealt with a bad step: those behind it are held no more."""

    @property
    def outdated(self) -> bool:
        """Whether the optimizer's parameters have changed since they were last looked at."""
        return False

    def follow(self) -> str:
        """Take in what model and optimizer are made of now. Return what changed, in words."""
        return ""

    def close(self) -> None:
        """Let go of model and optimizer."""
        self.buffers.close()
