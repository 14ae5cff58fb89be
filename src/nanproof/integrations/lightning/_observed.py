"""FitObserver: record one fit of Lightning's Trainer and change nothing. Lightning's own hooks are enough for that: they run
before clipping, so no method is replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from nanproof.core.support._index import next_folder, write_index
from nanproof.integrations._groups import name_of
from nanproof.integrations._observed import ObservedRun


class FitObserver:
    """Records every step of every optimizer."""

    def __init__(self, trainer: Any, run: ObservedRun) -> None:
        """`run`: the first optimizer's. The others get runs like it, which share its list of incidents."""
        self.trainer, self.runs = trainer, [run]
        self._fresh: list[Tensor] = []
        """Losses of the backwards since any optimizer's last step."""
        self._stepped_on: list[Tensor] = []
        """Those that the last step was about."""
        self._optimizers = [getattr(o, "optimizer", o) for o in trainer.optimizers]
        by_value = str(getattr(trainer.gradient_clip_algorithm, "value", trainer.gradient_clip_algorithm)) == "value"
        folders = [] if run.run_dir is None else [Path(run.run_dir)]
        self.observes = False
        """Whether any optimizer is observed."""
        for i, optimizer in enumerate(self._optimizers):
            if i:
                folders += [next_folder(folders[0], folders)] if folders else []
                self.runs.append(ObservedRun(folders[-1] if folders else None, run.incidents))
            self.observes |= self.runs[i].start(
                trainer.strategy.model,
                optimizer,
                max_norm=None if by_value else trainer.gradient_clip_val or None,
                scaler=self._scaler,
                step=trainer.global_step // len(self._optimizers),
            )
        if folders and self.observes and trainer.is_global_zero:
            model = type(trainer.lightning_module).__name__
            names = [f"{name_of([optimizer])} of {model}" for optimizer in self._optimizers]
            write_index(folders[0], list(zip(folders, names, strict=True)))

    @property
    def _scaler(self) -> Any:
        return getattr(self.trainer.precision_plugin, "scaler", None)

    def before_backward(self, loss: Tensor) -> None:
        """With the loss as backward gets it: scaled, if there is a scaler."""
        scaler = self._scaler
        loss = loss.detach()
        self._fresh.append(loss if scaler is None else loss / scaler.scale(loss.new_ones((), dtype=loss.dtype)))

    def before_step(self, optimizer: Any) -> None:
        """Before clipping. Where there was no backward since another optimizer's step, both step on the same ones."""
        if self._fresh:
            self._stepped_on, self._fresh = self._fresh, []
        bare = getattr(optimizer, "optimizer", optimizer)
        run = next((run for run, known in zip(self.runs, self._optimizers, strict=True) if known is bare), None)
        if run is None:
            return  # one that configure_optimizers did not return
        run.end()
        for loss in self._stepped_on:
            run.loss(loss)
        # Lightning has unscaled them, except for an optimizer that does so itself.
        run.look(unscaled=not getattr(bare, "_step_supports_amp_scaling", False))

    def batch_ended(self) -> None:
        for run in self.runs:
            run.end()

    def close(self) -> None:
        for run in self.runs:
            run.close()
