"""The Trainer's averages of the loss, without what is no number.

The Trainer adds every loss to a running sum, which one NaN spoils for ever. A bad loss is kept out of it, and the averages made
of it are corrected: they are means over the steps whose loss was finite.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from transformers import Trainer

from nanproof.integrations.loop import LoopGuard


class HonestLoss:
    """Keeps a bad loss out of the trainer's running sum, which it would spoil for ever, and out of the averages made of it."""

    def __init__(self, step: int, refused: int) -> None:
        """The trainer begins at this step; so many had been refused before."""
        self._begun = self._told = step
        self._refused = refused
        self._steps, self._sum = 0.0, 0.0
        """What all averages so far left out."""

    @staticmethod
    def of(loss: Tensor) -> Tensor:
        """What to add to the running sum for a micro-batch."""
        return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)

    def correct(self, logs: dict[str, float], trainer: Trainer, guard: LoopGuard) -> None:
        """The mean of the window, over the steps whose loss was finite; NaN if there was none."""
        count = trainer.state.global_step - self._told
        steps, total = self._left_out(trainer, guard)
        if steps:
            logs["loss"] = _mean_without(logs["loss"], count, steps, total)

    def correct_total(self, logs: dict[str, float], trainer: Trainer, guard: LoopGuard) -> None:
        """The same for the whole run, with what came after the last window."""
        self._left_out(trainer, guard)
        if self._steps:
            count = trainer.state.global_step - self._begun
            logs["train_loss"] = _mean_without(logs["train_loss"], count, self._steps, self._sum)

    def _left_out(self, trainer: Trainer, guard: LoopGuard) -> tuple[float, float]:
        """Since the last time: how many steps had a bad loss, and what of them is in the running sum all the same."""
        since, self._told = self._told, trainer.state.global_step
        refused, self._refused = self._refused, guard.refused_so_far
        if refused == guard.refused_so_far:
            return 0.0, 0.0
        # Every rank comes here: all of them know of a refused step, though the loss may have been one rank's.
        spoiled = [
            torch.stack([self.of(loss.float()) for loss in losses]).sum() for step, losses in guard.spoiled if step >= since
        ]
        guard.spoiled.clear()
        counted = torch.zeros(2, device=trainer.args.device)
        for loss in spoiled:
            counted += torch.stack([torch.ones_like(loss), loss])
        steps, total = (trainer.accelerator.reduce(counted, "sum") / trainer.accelerator.num_processes).tolist()
        self._steps, self._sum = self._steps + steps, self._sum + total
        return steps, total


def _mean_without(mean: float, count: int, steps: float, total: float) -> float:
    """A mean over `count`, without so many of them that add up to `total`."""
    return (mean * count - total) / (count - steps) if steps < count else math.nan
