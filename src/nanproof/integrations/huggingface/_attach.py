"""Attach a guard, or with `observe_only` an observer, to the trainer that a callback belongs to.

transformers never gives a callback its trainer, and a guard must be in place before `train` chooses a checkpoint. So the first
callback that is made wraps `Trainer.train`, which then looks for these callbacks. A trainer without one trains as before.

`nanproof run` calls this while transformers is being imported, so nothing of transformers is imported here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nanproof.integrations import automatic


def follow_callbacks(trainer_class: Any) -> None:
    """Have `Trainer.train` look for callbacks that attach a guard, unless it does."""
    plain: Callable[..., Any] = trainer_class.train
    if hasattr(plain, "nanproof_follows"):
        return

    @functools.wraps(plain)
    def train(self: Any, *args: Any, **kwargs: Any) -> Any:
        from nanproof.integrations.huggingface._observed import TrainerObserver
        from nanproof.integrations.huggingface._trainer import attach, views_of

        views = views_of(self)
        if not views or getattr(self, "nanproof", None) is not None:
            return plain(self, *args, **kwargs)
        if any(view.observe_only for view in views):
            observer = TrainerObserver(self)
            try:
                return plain(self, *args, **kwargs)
            finally:
                observer.close()
        watch = attach(self)
        automatic[self] = watch.guard
        return watch.train(functools.partial(plain, self), *args, **kwargs)

    train.nanproof_follows = True  # type: ignore[attr-defined]
    trainer_class.train = train
