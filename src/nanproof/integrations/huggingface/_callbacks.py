"""Callbacks of the Trainer that people know by name. They read the records of the run's guard: what they report was seen before
clipping, and costs nothing extra. A trainer that nobody protects gets its guard from them, when its training begins.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainerCallback

from nanproof._errors import UsageError
from nanproof._records import ABSENT, StepRecord
from nanproof._wording import listed
from nanproof.integrations._observed import ObservedRun
from nanproof.integrations._protected import ProtectedRun
from nanproof.integrations.huggingface._attach import follow_callbacks
from nanproof.observe._activations import Observer
from nanproof.observe._settings import AUTO, Observe
from nanproof.observe._tables import COLUMNS, Seen, largest

log = logging.getLogger("nanproof")

Modules = str | Sequence[str] | Callable[[str, nn.Module], bool]
"""Which modules: names with wildcards, or a function of name and module."""


class GuardView(TrainerCallback):
    """Reads the records of a trainer's run.

    `callbacks=[...]` is all it takes: when training begins, the trainer is guarded as by `nanproof.protect(trainer)` with default
    settings. Several of these callbacks share one guard. If the user calls `protect` too, that is the guard, with its settings.

    With `observe_only=True` on any of them, losses and gradients are read and recorded, and that is all. A bad step is recorded
    and then taken, as without nanproof: weights may become NaN. Clipping, schedule, checkpoints and what the trainer logs stay
    its own. Nothing is refused, diagnosed or resumed from a better checkpoint, and GRPO's sampling is not guarded. What
    `protect` or `nanproof run` guards stays guarded.
    """

    def __init__(self, observe_only: bool = False) -> None:
        self.observe_only = observe_only
        self.guard: ProtectedRun | ObservedRun | None = None
        """The run whose records it reads; set when training begins."""
        self._seen = -1
        follow_callbacks(Trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.guard is None:
            raise UsageError(
                f"{type(self).__name__}: this trainer overrides train() without calling super().train(), so no guard was "
                "attached. hint: call nanproof.protect(trainer) before train()"
            )
        self._seen = state.global_step - 1

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last steps too: all records are in by now."""
        self.on_step_end(args, state, control, **kwargs)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Join the log of a trainer that nothing guards, as far as a callback can: its history, and callbacks that come later."""
        if not isinstance(self.guard, ProtectedRun) and logs is not None and "loss" in logs:
            logs.update(self.metrics())
            if state.log_history:
                state.log_history[-1].update(self.metrics())

    def metrics(self) -> dict[str, float]:
        """What joins the trainer's next log."""
        return {}

    def _new(self) -> Iterator[StepRecord]:
        new = []
        for record in reversed(() if self.guard is None else self.guard.history):
            if record.step <= self._seen:
                break
            new.append(record)
        for record in reversed(new):
            self._seen = record.step
            yield record


@dataclass(frozen=True, slots=True)
class GradientSummary:
    """The gradients of one step, before clipping."""

    step: int
    mean: float
    max: float
    min: float
    nan: int
    """Parameters whose norm is NaN."""
    inf: int
    bad: tuple[str, ...]
    """Their names."""

    @classmethod
    def of(cls, record: StepRecord) -> GradientSummary:
        there = [(name, norm) for name, norm in zip(record.names, record.norms, strict=True) if norm != ABSENT]
        finite = [norm for _, norm in there if math.isfinite(norm)]
        return cls(
            record.step,
            sum(finite) / len(finite) if finite else math.nan,
            max(finite, default=math.nan),
            min(finite, default=math.nan),
            sum(math.isnan(norm) for _, norm in there),
            sum(math.isinf(norm) for _, norm in there),
            tuple(name for name, norm in there if not math.isfinite(norm)),
        )


class GradientMonitorCallback(GuardView):
    """Norms of the gradients of every parameter, before clipping: mean, largest, smallest, and which were NaN or Inf.

    It guards the trainer if nothing else does: bad steps are refused. With `observe_only=True` they are only recorded, and the
    optimizer steps on them as it does without nanproof.
    """

    def __init__(
        self,
        check_every_n_steps: int = 1,
        log_every_n_steps: int = 50,
        halt_on_nan: bool = False,
        *,
        observe_only: bool = False,
    ) -> None:
        """
        Args:
            check_every_n_steps: steps from one look at the records to the next.
            log_every_n_steps: steps from one line in the log to the next, at level INFO; a bad step is a warning.
            halt_on_nan: end training after a bad step.
            observe_only: change nothing of the run: no step is refused, nothing is diagnosed.
        """
        super().__init__(observe_only)
        _positive(check_every_n_steps=check_every_n_steps, log_every_n_steps=log_every_n_steps)
        self.check_every_n_steps, self.log_every_n_steps, self.halt_on_nan = check_every_n_steps, log_every_n_steps, halt_on_nan
        self.last: GradientSummary | None = None
        """Of the step that was looked at last."""
        self.bad_steps = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for record in self._new():
            if record.step % self.check_every_n_steps:
                continue
            before, self.last = self.last, GradientSummary.of(record)
            summary, due = self.last, record.step % self.log_every_n_steps == 0
            if summary.bad:
                self.bad_steps += 1
                control.should_training_stop |= self.halt_on_nan
            if summary.bad and (due or before is None or not before.bad):  # not at every step of a run that stays bad
                log.warning(
                    "nanproof: step %d: gradients of %d parameters are NaN, of %d Inf: %s",
                    summary.step,
                    summary.nan,
                    summary.inf,
                    listed(summary.bad),
                )
            elif due and not summary.bad:
                log.info(
                    "nanproof: step %d: gradient norms mean %.3g, max %.3g, min %.3g",
                    summary.step,
                    summary.mean,
                    summary.max,
                    summary.min,
                )

    def metrics(self) -> dict[str, float]:
        if self.last is None:
            return {}
        return {
            "nanproof/grad_norm_mean": self.last.mean,
            "nanproof/grad_norm_max": self.last.max,
            "nanproof/grad_norm_min": self.last.min,
            "nanproof/bad_gradient_steps": self.bad_steps,
        }


GradientMonitoringCallback = GradientMonitorCallback


class LossCheckCallback(GuardView):
    """Is the loss a number, and is there anything to learn from? NaN and Inf; and exactly 0 with no gradient, which is what a
    batch without a supervised token looks like.

    It guards the trainer if nothing else does; with `observe_only=True` it changes nothing.
    """

    def __init__(self, halt_on_nan: bool = False, *, observe_only: bool = False) -> None:
        super().__init__(observe_only)
        self.halt_on_nan = halt_on_nan
        self.nonfinite: list[int] = []
        """Steps whose loss was NaN or Inf."""
        self.empty: list[int] = []
        """Steps whose loss and gradients were exactly 0."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for record in self._new():
            if not math.isfinite(record.loss):
                if self.nonfinite[-1:] != [record.step - 1]:  # not at every step of a run that stays bad
                    log.warning("nanproof: step %d: the loss is %s", record.step, record.loss)
                self.nonfinite.append(record.step)
                control.should_training_stop |= self.halt_on_nan
            elif record.loss == 0 and record.grad_norm == 0:
                self.empty.append(record.step)
                log.warning(
                    "nanproof: step %d: loss and gradients are exactly 0: no token of the batch is supervised?", record.step
                )

    def metrics(self) -> dict[str, float]:
        return {"nanproof/nonfinite_losses": len(self.nonfinite), "nanproof/empty_losses": len(self.empty)}


class ActivationMonitorCallback(GuardView):
    """The largest output of the chosen modules at every step, and which are not finite; every so many steps a full look.

    It guards the trainer if nothing else does, and makes the guard observe, unless `protect` was given `observe=`: gradients,
    weights, attention and forecasts come with that. With `observe_only=True` it looks at outputs by itself and changes nothing.
    Nothing waits for the device: what a step looked like is read at the end of the next one.
    """

    def __init__(self, check_every_n_steps: int = 50, modules: Modules | None = None, *, observe_only: bool = False) -> None:
        """
        Args:
            check_every_n_steps: steps from one full look to the next; `last` is of these, and of steps that were bad.
            modules: whose outputs: a function of name and module, names with wildcards, or None for `Observe`'s own choice.
            observe_only: change nothing of the run: no step is refused, nothing is diagnosed.
        """
        super().__init__(observe_only)
        _positive(check_every_n_steps=check_every_n_steps)
        self.check_every_n_steps = check_every_n_steps
        self.settings = Observe(every=check_every_n_steps, modules=AUTO if modules is None else modules)
        """What a guard observes for it."""
        self.last: dict[str, float] = {}
        """Largest absolute output by module, of the last look; NaN or Inf where there is one."""
        self.bad: list[int] = []
        """Steps in which an output was NaN or Inf."""
        self._near = 0.0
        """The largest share of an output close to its dtype's maximum, at the last full look."""
        self._observer: Observer | None = None
        self._sent: tuple[int, Callable[[], Seen]] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._stop()
        self._seen = state.global_step - 1
        if self.guard is None or self.guard.observe is None:
            model: nn.Module = kwargs["model"]
            device = next((p.device for p in model.parameters()), torch.device(args.device))
            self._observer = Observer(model, replace(self.settings, gradients=False), device)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._observer is not None:
            self._observer.begin(full=state.global_step % self.check_every_n_steps == 0)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._observer is None:
            self._read_records()
        else:
            self._read_sent()
            self._sent = state.global_step - 1, self._observer.send()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last steps too: the guard's records are all in by now."""
        if self._observer is None:
            self._read_records()
        self._stop()

    def metrics(self) -> dict[str, float]:
        if not self.last:
            return {}
        return {
            "nanproof/activation_max": reduce(largest, self.last.values()),
            "nanproof/activation_near_max": self._near,
            "nanproof/bad_activation_steps": len(self.bad),
        }

    def _read_records(self) -> None:
        for record in self._new():
            if record.observed is not None:
                self._note(record.step, record.observed.by_site, record.observed.outputs.get("near", ()))

    def _read_sent(self) -> None:
        sent, self._sent = self._sent, None
        if sent is None or self._observer is None:
            return
        step, read = sent
        sites, seen = self._observer.sites, read()
        near = [row[COLUMNS.index("near")] / row[COLUMNS.index("count")] for row in seen.rows.values()]
        self._note(step, {site: top for site, top in zip(sites, seen.absmax, strict=False) if top != ABSENT}, near)

    def _note(self, step: int, by_site: dict[str, float], near: Iterable[float]) -> None:
        bad = [name for name, value in by_site.items() if not math.isfinite(value)]
        due = step % self.check_every_n_steps == 0
        if bad and (due or self.bad[-1:] != [step - 1]):  # not at every step of a run that stays bad
            first = _first_to_end(bad)
            more = f", and {len(bad) - 1} more: {listed([name for name in bad if name != first])}" if len(bad) > 1 else ""
            log.warning("nanproof: step %d: outputs that are not finite: first %s (%s)%s", step, first, by_site[first], more)
        if bad:
            self.bad.append(step)
        if (bad or due) and by_site:
            self.last = by_site
        self._near = max(near, default=self._near)

    def _stop(self) -> None:
        self._read_sent()
        if self._observer is not None:
            self._observer.close()
        self._observer = None


def _first_to_end(names: list[str]) -> str:
    """Of modules in the order of the model, in which parents come before their parts, the one whose output came first."""
    first = names[0]
    for name in names:
        if name.startswith(f"{first}."):
            first = name
    return first


def _positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise UsageError(f"{name}={number}: a number of steps of 1 or more is needed")
