"""A step of the Trainer, run again: its own `training_step` up to backward, on what the forward was given."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from nanproof._errors import UsageError
from nanproof.core._under_way import LossFn
from nanproof.integrations._patches import Patches

BESIDES = "trainer"
"""The key of what a micro-batch needs besides the inputs."""


def micro_batch(trainer: Trainer, given: Any, num_items_in_batch: Any) -> dict[str, Any]:
    """What one forward of the trainer is given, in plain dictionaries, which a bundle can hold."""
    besides = {
        "num_items_in_batch": num_items_in_batch,
        "accumulation": trainer.current_gradient_accumulation_steps,
        "step": trainer.state.global_step,
        "epoch": trainer.state.epoch,
    }
    return {**(given if isinstance(given, Mapping) else {"inputs": given}), BESIDES: besides}


def replay_loss(trainer: Trainer) -> LossFn:
    """The loss function of a trainer for `nanproof replay` and `nanproof.diagnose`, over micro-batches from its bundles."""
    again = Again(trainer)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        patches = Patches()
        patches.wrap(trainer, "_prepare_inputs", lambda original, inputs: inputs)
        patches.wrap(trainer.accelerator, "backward", lambda original, loss, **kwargs: again.take(loss))
        try:
            return again.loss_fn(model, batch)
        finally:
            patches.undo()

    loss_fn.weighted = True  # type: ignore[attr-defined]
    return loss_fn


class Again:
    """Runs a recorded micro-batch again. Whoever replaced `_prepare_inputs` and `backward` asks whether it is `running`."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.training_step: Callable[..., Tensor] = trainer.training_step
        self._losses: list[Tensor] | None = None

    @property
    def running(self) -> bool:
        return self._losses is not None

    def take(self, loss: Tensor) -> None:
        """What backward would have got."""
        assert self._losses is not None
        self._losses.append(loss)

    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor:
        """What the trainer's own `training_step` would give to backward for this micro-batch."""
        if not isinstance(batch, Mapping) or not isinstance(batch.get(BESIDES), Mapping):
            raise UsageError("the trainer's loss needs a micro-batch as the guard recorded it")
        besides = batch[BESIDES]
        inputs: Any = {key: value for key, value in batch.items() if key != BESIDES}
        if set(inputs) == {"inputs"} and not isinstance(inputs["inputs"], Tensor):
            inputs = inputs["inputs"]
        losses: list[Tensor] = []
        with _undisturbed(self._trainer), _as_it_was(self._trainer, besides):
            self._losses = losses
            try:
                self.training_step(model, inputs, besides["num_items_in_batch"])
            finally:
                self._losses = None
        if not losses:
            raise UsageError("this trainer's training_step calls no accelerator.backward: its steps cannot be run again")
        return losses[0] if len(losses) == 1 else torch.stack([loss.reshape(()) for loss in losses]).sum()


@contextmanager
def _undisturbed(trainer: Trainer) -> Iterator[None]:
    """What the trainer counts and collects on the way (metrics, tokens) is counted once."""
    attributes = vars(trainer)
    before = {name: value for name, value in attributes.items() if _plain(value)}
    attributes.update({name: _copied(value) for name, value in before.items()})
    try:
        yield
    finally:
        attributes.update(before)


@contextmanager
def _as_it_was(trainer: Trainer, besides: Mapping[str, Any]) -> Iterator[None]:
    """The trainer's counters are those of the micro-batch: losses that change over the run go by them."""
    state = trainer.state
    at = state.global_step, state.epoch
    trainer.current_gradient_accumulation_steps = besides["accumulation"]  # put back with the other numbers
    state.global_step, state.epoch = besides["step"], besides["epoch"]
    try:
        yield
    finally:
        state.global_step, state.epoch = at


def _plain(value: Any) -> bool:
    """Numbers, and containers that a trainer collects them in."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return True
    return type(value).__name__ in ("dict", "list", "deque", "defaultdict")


def _copied(value: Any, depth: int = 0) -> Any:
    if depth >= 3:
        return value
    if isinstance(value, dict):
        copied = copy.copy(value)
        for key, item in value.items():
            copied[key] = _copied(item, depth + 1)
        return copied
    if isinstance(value, deque):
        return copy.copy(value)
    if isinstance(value, list):
        return [_copied(item, depth + 1) for item in value]
    return value
