"""Lightning's training step, run again: what `training_step` was called with, how to call it again without a trace, and the
schedules that only an accepted step advances."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanproof.core.judge._parameters import unwrap
from nanproof.core.support._tree import own_copy
from nanproof.explain.replay._attributes import restore_attributes, saved_attributes

_NEVER = sys.maxsize
"""A frequency that no count of batches reaches."""


@dataclass(frozen=True)
class TrainingStep:
    """One micro-batch: what Lightning called `training_step` with."""

    batch: Any
    batch_idx: int
    parts: int
    """How many batches Lightning accumulates: it divides the loss by this."""
    written: bool = False
    """Whether `training_step` writes into its batch: this is a copy from before that."""


class Rerun:
    """The loss function for a guard: `training_step` of a recorded micro-batch, as Lightning calls it.

    Logging is silenced, and what the module and its metrics keep in plain attributes is put back: both happened already, when
    the step was run the first time.
    """

    def __init__(self, strategy: Any, module: nn.Module) -> None:
        self._model, self._contexts = strategy.model, strategy.precision_plugin
        self._training_step: Callable[..., Any] = strategy.training_step
        names = inspect.signature(module.training_step).parameters  # type: ignore[arg-type]
        self.possible = "dataloader_iter" not in names
        """False where the step draws its batches itself."""
        self.takes_index = True
        """Whether `training_step` is given the index too: as Lightning called it last."""

    def __call__(self, model: nn.Module, step: TrainingStep) -> Tensor:
        arguments = (own_copy(step.batch), step.batch_idx) if self.takes_index else (own_copy(step.batch),)
        with without_trace(model):
            if model is self._model:
                output = self._training_step(*arguments)
            else:
                with self._contexts.train_step_context():
                    output = unwrap(model).training_step(*arguments)  # type: ignore[operator]
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if loss is None:  # the batch is to be left out, and so adds nothing
            loss = torch.zeros((), requires_grad=True)
        return loss / step.parts


@contextmanager
def without_trace(model: nn.Module) -> Iterator[None]:
    """`self.log` and `self.log_dict` say nothing, and plain attributes (counters, lists of outputs, metrics) are as before."""
    modules = list(model.modules())
    before = [(module, saved_attributes(module)) for module in modules]
    for module in modules:
        if hasattr(type(module), "log_dict"):
            module.__dict__["log"] = module.__dict__["log_dict"] = _nothing
    try:
        yield
    finally:
        for module, saved in before:
            restore_attributes(module, saved)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


class StepSchedules:
    """The learning-rate schedules that Lightning advances every so many batches, advanced by the guard instead: it knows which
    steps were taken. Lightning's own call is made to find none of them due."""

    def __init__(self, trainer: Any, module: Any) -> None:
        self._trainer, self._module = trainer, module
        self._configs = [c for c in trainer.lr_scheduler_configs if c.interval == "step" and not c.reduce_on_plateau]
        self._every = [c.frequency for c in self._configs]
        self.taken = 0
        """Steps of this epoch that were taken: Lightning counts from each epoch's beginning."""
        for config in self._configs:
            config.frequency = _NEVER

    def step(self) -> None:
        self.taken += 1
        batches = self.taken * self._trainer.accumulate_grad_batches
        for config, every in zip(self._configs, self._every, strict=True):
            # A callback (StochasticWeightAveraging, say) may have put another schedule in its place.
            if batches % every == 0 and any(c is config for c in self._trainer.lr_scheduler_configs):
                self._module.lr_scheduler_step(config.scheduler, None)

    @property
    def _schedulers(self) -> list[Any]:
        return [config.scheduler for config in self._configs]

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken, "schedulers": [s.state_dict() for s in self._schedulers]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]
        for scheduler, saved in zip(self._schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)

    def give_back(self) -> None:
        """Lightning advances them again."""
        for config, every in zip(self._configs, self._every, strict=True):
            config.frequency = every
