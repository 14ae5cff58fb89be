"""Arguments that cannot be right: said before anything is done with them."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from nanproof._errors import UsageError
from nanproof._policy import Policy

log = logging.getLogger("nanproof")


def check_arguments(model: Any, max_norm: Any, policy: Any, scheduler: Any, checkpoints: Any) -> None:
    """What `Guard` is made with."""
    if checkpoints is not None and not hasattr(checkpoints, "prove"):
        raise UsageError(
            f"Guard(checkpoints=...): a nanproof.Checkpoints is needed, not {type(checkpoints).__name__}; "
            "write checkpoints=nanproof.Checkpoints(folder)"
        )
    if isinstance(max_norm, str) and max_norm != "auto":
        raise UsageError(f'Guard(max_norm={max_norm!r}): a number above 0, "auto" or None is needed')
    if isinstance(max_norm, bool) or (isinstance(max_norm, (int, float)) and not max_norm > 0):
        raise UsageError(f"Guard(max_norm={max_norm!r}): the norm to clip to must be above 0; None turns clipping off")
    if not isinstance(model, nn.Module):
        raise UsageError(f"Guard(model=...): a torch.nn.Module is needed, not {type(model).__name__}")
    if policy is not None and not isinstance(policy, Policy):
        raise UsageError(f"Guard(policy=...): a nanproof.Policy is needed, not {type(policy).__name__}")
    for each in getattr(scheduler, "schedulers", (scheduler,)) if scheduler is not None else ():
        _check_scheduler(each)


def _check_scheduler(scheduler: Any) -> None:
    if not hasattr(scheduler, "step"):
        raise UsageError(f"Guard(scheduler=...): a learning-rate scheduler is needed, not {type(scheduler).__name__}")
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UsageError("Guard(scheduler=ReduceLROnPlateau): it needs a metric; leave it out and call its step yourself")


def check_scalar(loss: Any, where: str) -> None:
    """What `backward` starts from."""
    if not isinstance(loss, Tensor):
        raise UsageError(f"guard.{where}: the loss must be a tensor, not {type(loss).__name__}")
    if loss.numel() != 1:
        raise UsageError(f"guard.{where}: the loss must be a scalar, not of shape {tuple(loss.shape)}; take its mean or sum")


class OwnLoop:
    """What a loop of the user's own cannot have, or has to do itself: said once."""

    def __init__(self, policy: Policy, scheduler: Any) -> None:
        self._policy, self._scheduler, self._seen = policy, scheduler, None

    def look(self, step: int) -> None:
        if step == 0 and (self._policy.salvage or self._policy.heal):
            log.warning("nanproof: guard.step: Policy(salvage=..., heal=...) acts on refused steps only, not on your own forward")
        if step not in (0, 2) or self._scheduler is None:
            return
        now = getattr(self._scheduler, "last_epoch", None)
        if step == 2 and now is not None and now == self._seen:
            log.warning("nanproof: the schedule stands still: guard.step does not advance it, call scheduler.step() yourself")
        self._seen = now
