"""TrainerObserver: record the training of transformers' Trainer and change nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import Trainer, TrainerCallback

from nanproof.integrations._observed import ObservedRun
from nanproof.integrations._patches import Patches

log = logging.getLogger("nanproof")


class TrainerObserver(TrainerCallback):
    """Records the steps of one trainer, and changes none of them."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        folder = trainer.args.output_dir
        self.run = ObservedRun(Path(folder) / "nanproof" if folder else None)
        self._patches = Patches()
        trainer.callback_handler.callbacks.insert(1, self)  # before those that read the records

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from nanproof.integrations.huggingface._trainer import views_of

        trainer = self.trainer
        self._patches.undo()  # a run that was begun again with a smaller batch
        for view in views_of(trainer):
            view.guard = self.run
        if trainer.is_deepspeed_enabled:
            log.warning("nanproof: DeepSpeed does not expose gradients, so this run is not observed")
            return
        limit = args.max_grad_norm
        assert trainer.optimizer is not None
        observed = self.run.start(
            trainer.model_wrapped,
            trainer.optimizer,
            max_norm=limit if limit and limit > 0 else None,
            scaler=getattr(trainer.accelerator, "scaler", None),
            step=state.global_step,
        )
        if observed:
            self._patches.wrap(trainer.accelerator, "backward", self._backward)
            self._patches.wrap(trainer.accelerator, "clip_grad_norm_", self._clip)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Where the trainer does not clip."""
        self.run.look()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.end()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.run.sync()

    def close(self) -> None:
        """The training is over, or has raised."""
        self._patches.undo()
        self.run.close()
        callbacks = self.trainer.callback_handler.callbacks
        callbacks[:] = [callback for callback in callbacks if callback is not self]

    def _backward(self, original: Callable[..., None], loss: Tensor, **kwargs: Any) -> None:
        self.run.loss(loss)
        original(loss, **kwargs)

    def _clip(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.run.look()
        return original(*args, **kwargs)
