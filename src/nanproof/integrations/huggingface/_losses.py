"""The losses of the Trainer: their averages, without what is no number, and a look at each of them.

The Trainer adds every loss to a running sum, which one NaN spoils for ever. A bad loss is kept out of it, and the averages made
of it are corrected: they are means over the steps whose loss was finite. `safe_compute_loss` says which term of a loss is bad and
which sample, and changes nothing.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Callable
from functools import wraps
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback

from nanproof._errors import UsageError
from nanproof._wording import few
from nanproof.core.support._context import rehearsal
from nanproof.integrations._protected import ProtectedRun
from nanproof.integrations.huggingface._loss_checks import (
    Facts,
    LossCheck,
    labels_of,
    out_of_range,
    read_all,
    shifts_labels,
    vocabulary,
)

log = logging.getLogger("nanproof")

_WAITING = 1000
"""Checks that wait for the trainer's next log at the most; then they are read anyway."""


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

    def correct(self, logs: dict[str, float], trainer: Trainer, guard: ProtectedRun) -> None:
        """The mean of the window, over the steps whose loss was finite; NaN if there was none."""
        count = trainer.state.global_step - self._told
        steps, total = self._left_out(trainer, guard)
        if steps:
            logs["loss"] = _mean_without(logs["loss"], count, steps, total)

    def correct_total(self, logs: dict[str, float], trainer: Trainer, guard: ProtectedRun) -> None:
        """The same for the whole run, with what came after the last window."""
        self._left_out(trainer, guard)
        if self._steps:
            count = trainer.state.global_step - self._begun
            logs["train_loss"] = _mean_without(logs["train_loss"], count, self._steps, self._sum)

    def _left_out(self, trainer: Trainer, guard: ProtectedRun) -> tuple[float, float]:
        """Since the last time: how many steps had a bad loss, and what of them is in the running sum all the same."""
        since, self._told = self._told, trainer.state.global_step
        refused, self._refused = self._refused, guard.refused_so_far
        if refused == guard.refused_so_far:
            return 0.0, 0.0
        # Every rank comes here: all of them know of a refused step, though the loss may have been one rank's.
        spoiled = [
            torch.stack([self.of(loss.float()) for loss in losses]).sum()
            for step, losses in guard.account.spoiled
            if step >= since
        ]
        guard.account.spoiled.clear()
        counted = torch.zeros(2, device=trainer.args.device)
        for loss in spoiled:
            counted += torch.stack([torch.ones_like(loss), loss])
        steps, total = (trainer.accelerator.reduce(counted, "sum") / trainer.accelerator.num_processes).tolist()
        self._steps, self._sum = self._steps + steps, self._sum + total
        return steps, total


def _mean_without(mean: float, count: int, steps: float, total: float) -> float:
    """A mean over `count`, without so many of them that add up to `total`."""
    return (mean * count - total) / (count - steps) if steps < count else math.nan


ComputeLoss = Callable[..., Any]


def safe_compute_loss(compute_loss: Trainer | ComputeLoss, *, check: Literal["log", "step"] = "log") -> ComputeLoss:
    """A look at every loss of a Trainer in training: `safe_compute_loss(trainer)`, or
    `trainer.compute_loss = safe_compute_loss(trainer.compute_loss)`. Returns the function that does it.

    What the trainer's own function returns is returned: the same tensor, NaN stays NaN and 0 stays 0. No number is made up for a
    bad loss: a small constant has no gradient, and hides that the weights may be NaN already.

    Looked at are the labels (in the vocabulary, some token of each sample supervised) and the loss (one number, finite). Terms
    beside it that the model returns (`aux_loss`, `loss_dict`) and logits say which term was bad and in which sample; the logits
    are read once for that. Trainers of TRL return neither. Where the trainer is protected (`nanproof.protect(trainer)`) the
    guard refuses the step, and the incident says it. Else it is logged as a warning, once for each row of bad steps.

    Args:
        check: when the host reads what the device found. "log": when the trainer logs, and has waited for the device anyway;
            until then nothing waits, but for the labels of the first batch. "step": at every micro-batch, which waits; a label
            out of range then raises before the forward, where it would end in an assertion of the device. On a CPU both are the
            same, and at once.

    Raises `UsageError` for labels out of range, where it is known before the forward, and for a loss that is no tensor or not
    one number.
    """
    original: ComputeLoss = compute_loss.compute_loss if isinstance(compute_loss, Trainer) else compute_loss
    if hasattr(original, "nanproof_looks"):  # looked at already; twice would say everything twice
        return original
    trainer = compute_loss if isinstance(compute_loss, Trainer) else getattr(compute_loss, "__self__", None)
    if not isinstance(trainer, Trainer):
        raise UsageError("safe_compute_loss(...): a Trainer is needed, or its method: safe_compute_loss(trainer.compute_loss)")
    if check not in ("log", "step"):
        raise UsageError(f'safe_compute_loss(check={check!r}): "log" or "step" is needed')
    looks = _Looks(trainer, original, every_step=check == "step")

    @wraps(original)
    def safe(model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        return looks.at(model, inputs, return_outputs, num_items_in_batch)

    safe.nanproof_looks = looks  # type: ignore[attr-defined]
    if compute_loss is trainer:
        trainer.compute_loss = safe  # type: ignore[method-assign]
    return safe


class _Looks(TrainerCallback):
    """Looks at the losses of one trainer, and tells of those that are bad."""

    def __init__(self, trainer: Trainer, original: ComputeLoss, every_step: bool) -> None:
        self._trainer, self._original, self._every_step = trainer, original, every_step
        accepts = inspect.signature(original).parameters
        any_keyword = any(p.kind is p.VAR_KEYWORD for p in accepts.values())
        self._takes_items = "num_items_in_batch" in accepts or any_keyword
        # Those of TRL raise if they are asked for the outputs, or run a second forward to make the logits.
        of_trl = any(cls.__module__.partition(".")[0] == "trl" for cls in type(trainer).__mro__)
        self._gives_outputs = ("return_outputs" in accepts or any_keyword) and not of_trl
        self._first = True
        self._unread: list[tuple[LossCheck, bool]] = []
        """What the device found and nobody has read, and whether a guard knows of it."""
        self._last_bad, self._count, self._told_of_samples = -2, 0, False
        trainer.add_callback(self)

    def at(self, model: nn.Module, inputs: Any, return_outputs: bool, num_items: Any) -> Any:
        kwargs = {"num_items_in_batch": num_items} if self._takes_items else {}
        if return_outputs:
            kwargs["return_outputs"] = True
        if rehearsal or not (model.training and torch.is_grad_enabled()):
            return self._original(model, inputs, **kwargs)
        labels, size = labels_of(inputs), vocabulary(model)
        self._check_labels(labels, size)
        if self._gives_outputs:
            kwargs["return_outputs"] = True
        result = self._original(model, inputs, **kwargs)
        loss, outputs = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
        self._check_shape(loss)
        self._look(LossCheck.of(self._trainer.state.global_step, loss, outputs, labels, size, shifts_labels(model)))
        return (loss, outputs) if return_outputs else loss

    def _check_labels(self, labels: Tensor | None, size: int | None) -> None:
        """Before the forward, where that waits for nothing, for the first batch, and where it was asked for."""
        first, self._first = self._first, False
        if labels is None or size is None or not (first or self._every_step or labels.device.type == "cpu"):
            return
        outside = out_of_range(labels, size)
        if bool(outside.any()):
            where = torch.nonzero(outside)
            rows = sorted({int(i) for i in where[:, 0]})
            raise UsageError(
                f"safe_compute_loss: step {self._trainer.state.global_step}: {len(where)} labels are not ids of the model, which "
                f"knows 0 to {size - 1}: {int(labels[tuple(where[0])])} in sample {rows[0]}; samples {few(rows, 10)}. Check the "
                "tokenizer against the model (resize_token_embeddings), and that what is ignored is -100"
            )

    def _check_shape(self, loss: Any) -> None:
        called = "safe_compute_loss: compute_loss returned"
        if loss is None:
            raise UsageError(f"{called} None: the model made no loss; are the labels among the inputs?")
        if not isinstance(loss, Tensor):
            raise UsageError(f"{called} a {type(loss).__name__}; a tensor with one number is needed, as backward needs it")
        if loss.numel() != 1 and self._trainer.args.n_gpu <= 1:  # DataParallel returns one a device
            raise UsageError(f"{called} a tensor of the shape {list(loss.shape)}; reduce it to one number")

    def _look(self, check: LossCheck) -> None:
        guard = self._guard
        guarded = guard is not None and guard.started and guard.engine.remark(lambda: check.read().remark())
        self._unread.append((check, guarded))
        if self._every_step or check.vector.device.type == "cpu" or len(self._unread) >= _WAITING:
            self._read()

    @property
    def _guard(self) -> ProtectedRun | None:
        there = getattr(self._trainer, "nanproof", None)
        return there if isinstance(there, ProtectedRun) else None

    def _read(self) -> None:
        unread, self._unread = self._unread, []
        for (check, facts), (_, guarded) in zip(read_all([check for check, _ in unread]), unread, strict=True):
            self._tell(check.step, facts, guarded)

    def _tell(self, step: int, facts: Facts, guarded: bool) -> None:
        if facts.bad and not guarded:
            if step > self._last_bad + 1:
                log.warning("nanproof: step %d: %s; the trainer goes on with it. nanproof.protect(trainer) refuses such a step",
                            step, facts.said(alone=True))  # fmt: skip
            self._count += step != self._last_bad
            self._last_bad = step
        elif facts.without and not facts.bad and not self._told_of_samples:
            self._told_of_samples = True
            log.warning("nanproof: step %d: %s; such samples teach nothing (said once)", step, facts.said(alone=True))

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._read()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._first, self._last_bad, self._count, self._told_of_samples = True, -2, 0, False
        self._unread.clear()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._read()
        if self._count > 1:
            log.warning("nanproof: %d steps had a loss that is not finite", self._count)
