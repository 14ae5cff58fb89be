"""Three ways to take a step: as it was reported, as the document patched it, and under the guard.

The first two are kept as they were, mistakes included; what they do wrong is said where they do it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from nanproof import Guard, Incident, StepRecord
from nanproof_recipes.latent_dlm.config import Config
from nanproof_recipes.latent_dlm.model.diffusion import Terms

Batch = dict[str, Tensor]
Losses = Callable[[nn.Module, Batch], tuple[Tensor, Terms]]
"""The total of a batch, and its terms."""


@dataclass
class Window:
    """What was seen since the last line of the log: means over the steps that were taken, or, where none was and in the loops
    without a guard, over all."""

    step: int = -1
    """The last of them."""
    values: dict[str, float] = field(default_factory=dict)


class Loop(Protocol):
    """A training loop, one step at a time."""

    @property
    def skipped(self) -> int:
        """Steps that were not taken."""

    @property
    def back(self) -> int:
        """Times that the run went back."""

    @property
    def next_step(self) -> int: ...
    def step(self, batches: Sequence[Batch]) -> None: ...
    def window(self) -> Window | None:
        """Means since the last call; None where nothing is known yet. Waits for the device."""


class PlainLoop:
    """What the two loops without a guard share: they count, and keep what they saw on the device until it is asked for."""

    INFINITE = ""
    """What is done where the norm of the gradients is Inf."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any, losses: Losses, config: Config) -> None:
        self.model, self.optimizer, self.schedule, self.losses, self.config = model, optimizer, schedule, losses, config
        self.next_step = self.skipped = self.back = 0
        self._seen: list[tuple[tuple[str, ...], Tensor]] = []
        self._rate = 0.0
        """Of the last step that was seen; the schedule has gone on when it is asked for."""
        self.infinite: int | None = None
        """The first step whose norm of the gradients was Inf."""
        self.lost: int | None = None
        """The step since which no loss was finite."""

    def _see(self, loss: Tensor, terms: Terms, norm: Tensor) -> None:
        named = {"loss": loss, **terms, "grad_norm": norm}
        self._rate = float(self.optimizer.param_groups[0]["lr"])
        self._seen.append((tuple(named), torch.stack([x.detach().float() for x in named.values()])))

    def window(self) -> Window | None:
        seen, self._seen = self._seen, []
        if not seen:
            return None
        rows = torch.stack([vector for _, vector in seen])
        means, first = rows.mean(0).tolist(), self.next_step - len(seen)
        for step, row in enumerate(rows.tolist(), first):
            if math.isinf(row[-1]) and self.infinite is None:
                self.infinite = step
            self.lost = None if math.isfinite(row[0]) else step if self.lost is None else self.lost
        return Window(self.next_step - 1, {**dict(zip(seen[0][0], means, strict=True)), "learning_rate": self._rate})

    def story(self) -> list[str]:
        """What of it is worth telling."""
        told = []
        if self.infinite is not None:
            told.append(f"step {self.infinite}: the norm of the gradients was inf; {self.INFINITE}")
        if self.lost is not None:
            told.append(f"from step {self.lost} on no loss was finite")
        return told

    def _clipped(self, limit: float) -> Tensor:
        """Clips; the norm before that. Where the weights are split over ranks, so is the norm until it is asked for."""
        norm: Any = torch.nn.utils.clip_grad_norm_(self._parameters, limit)
        whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole

    @property
    def _parameters(self) -> list[Tensor]:
        return [p for p in self.model.parameters() if p.requires_grad]


class OriginalLoop(PlainLoop):
    """As reported. Clipping comes first, and an infinite norm has made finite gradients 0 and infinite ones NaN by the time they
    are looked at; only NaN is looked for; and after zeroing them, Adam moves all the same."""

    INFINITE = "that is not nan, and the step was taken"

    def step(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            loss, terms = self.losses(self.model, batch)
            (loss * self.config.loss.loss_scale).backward()
        limit = self.config.optimizer.grad_clip_norm or 1e6
        norm = self._clipped(limit)
        if torch.isnan(norm):
            for p in self._parameters:
                if p.grad is not None:
                    p.grad.zero_()
        self._see(loss, terms, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()
        self.next_step += 1


class DocumentLoop(PlainLoop):
    """As the document has it. A bad loss is skipped before backward, so on several ranks the others would wait for this one for
    ever; a norm that is not finite is skipped after clipping, so which gradient it was cannot be told any more. Once weights are
    NaN it skips for ever."""

    INFINITE = "the step was left out"

    def step(self, batches: Sequence[Batch]) -> None:
        self.next_step += 1
        for batch in batches:
            loss, terms = self.losses(self.model, batch)
            if torch.isnan(loss) or torch.isinf(loss):
                self._see(loss, terms, torch.tensor(math.nan, device=loss.device))
                self.optimizer.zero_grad(set_to_none=True)
                self.skipped += 1
                return
            (loss * self.config.loss.loss_scale / len(batches)).backward()
        norm = self._clipped(self.config.optimizer.grad_clip_norm or 1.0)
        self._see(loss, terms, norm)
        if torch.isnan(norm) or torch.isinf(norm):
            self.optimizer.zero_grad(set_to_none=True)
            self.skipped += 1
            return
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.schedule.step()


class GuardedLoop:
    """Under nanproof. What is logged comes out of the guard's records, which reach the host without a wait."""

    def __init__(self, guard: Guard, earlier: Sequence[Incident] = ()) -> None:
        """`earlier`: incidents of this run in processes before this one."""
        self.guard, self._earlier = guard, tuple(earlier)
        self._told = [guard.next_step - 1]
        """The last steps of the windows so far. Those of steps that were undone are told again."""

    @property
    def next_step(self) -> int:
        return self.guard.next_step

    @property
    def skipped(self) -> int:
        return sum(incident.action == "skipped" for incident in (*self._earlier, *self.guard.incidents))

    @property
    def back(self) -> int:
        """How often the run went back. A healed step is run again, which is not going back."""
        return sum(incident.restored_step is not None for incident in (*self._earlier, *self.guard.incidents))

    def step(self, batches: Sequence[Batch]) -> None:
        self.guard.train_step(*batches)
        self._follow()

    def _follow(self) -> None:
        """Also where the run goes back and is past the last window again before the next one."""
        while self._told and self._told[-1] >= self.guard.next_step:
            self._told.pop()

    def window(self) -> Window | None:
        self._follow()
        new = [record for record in self.guard.history if not self._told or record.step > self._told[-1]]
        taken = [record for record in new if record.action != "skipped"] or new
        if not taken:
            return None
        self._told.append(new[-1].step)
        return Window(new[-1].step, {**_means(taken), "learning_rate": taken[-1].lr[0]})


def _means(records: Sequence[StepRecord]) -> dict[str, float]:
    columns: dict[str, list[float]] = {}
    for record in records:
        for name, value in (("loss", record.loss), *record.terms, ("grad_norm", record.grad_norm)):
            columns.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in columns.items()}
