"""A Trainer that resumes a healed run: what the healing changed is in force before the Trainer loads into it.

The Trainer copies a checkpoint into the model as it was built. If fp32 weights and moments were read into fp16 ones, small second
moments would be 0 and the next step of Adam of any size; and an optimizer that parameters had joined would not fit at all. So
the guard begins just before the optimizer's state is loaded, puts the saved remedies in force, and has the weights read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import Trainer

from nanproof.core.support._casting import HALF, cast
from nanproof.integrations._patches import Patches
from nanproof.integrations._protected import ProtectedRun
from nanproof.integrations.huggingface._checkpoints import TrainerCheckpoints


class HealedResume:
    """Stands between one trainer and the checkpoint it resumes from."""

    def __init__(self, trainer: Trainer, guard: ProtectedRun, begin: Callable[[], None]) -> None:
        """`begin` starts the guard; model, optimizer and schedule are there by then."""
        self._trainer, self._guard, self._begin = trainer, guard, begin
        self._built = WeakTensorKeyDictionary()
        """The dtypes of half-precision weights as the user built them."""
        self._begun = False
        self._load_weights: Callable[..., Any] | None = None

    @contextmanager
    def remedies_first(self, folder: str | Path | None) -> Iterator[None]:
        """Around the trainer's `train`. Nothing is different where the checkpoint's run was not healed, or healing is off."""
        trainer, patches = self._trainer, Patches()
        self._begun = False
        self._note(trainer.model)
        if folder is not None and self._can_heal and TrainerCheckpoints.was_healed(folder):
            self._load_weights = patches.wrap(trainer, "_load_from_checkpoint", self._weights)
            patches.wrap(trainer, "_load_optimizer_and_scheduler", self._optimizer)
        try:
            yield
        finally:
            patches.undo()
            self._load_weights = None

    def begun(self) -> bool:
        """Whether the guard of the loop that begins now has begun already; asked once."""
        begun, self._begun = self._begun, False
        return begun

    @property
    def _can_heal(self) -> bool:
        return self._guard.policy.heal and self._trainer.args.world_size == 1

    def _note(self, model: nn.Module | None) -> None:
        for p in model.parameters() if model is not None else ():
            if p.requires_grad and p.dtype in HALF and p not in self._built:
                self._built[p] = p.dtype

    def _weights(self, original: Callable[..., Any], folder: Any, model: nn.Module | None = None) -> Any:
        """The trainer loads the model, before there is an optimizer. PEFT would put fp32 parameters in the place of
        half-precision adapters after it has rounded them; they are fp32 while it loads, and then as they were built: the
        remedy goes by that."""
        self._note(model if model is not None else self._trainer.model)
        self._cast(torch.float32)
        result = original(folder, model)
        self._cast(None)
        return result

    def _optimizer(self, original: Callable[..., Any], folder: Any) -> Any:
        """The trainer loads the optimizer; a second time where a run begins again with a smaller batch."""
        self._cast(None)
        self._begin()
        self._begun = True
        TrainerCheckpoints.load_guard(self._guard, folder)
        if any(p.dtype != dtype for p, dtype in self._built.items()):
            assert self._load_weights is not None
            self._load_weights(folder, self._trainer.model_wrapped if self._trainer.is_fsdp_enabled else None)
        return original(folder)

    def _cast(self, dtype: torch.dtype | None) -> None:
        """None: as they were built."""
        for p, built in self._built.items():
            cast(p, dtype or built)
