"""Trainers with an adapter of their own, in a script that knows nothing of nanproof: protected when their loop begins.

The classes are changed after the script has imported them, and only then; while such a loop runs, the generic patches keep their
hands off.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from nanproof.errors import NanproofError
from nanproof.integrations.session import Session

TRAINERS = {
    "transformers.trainer": ("Trainer", "train"),
    "lightning.pytorch.trainer.trainer": ("Trainer", "fit"),
    "pytorch_lightning.trainer.trainer": ("Trainer", "fit"),
}
"""The module, the class in it, and the method that trains."""


def follow(session: Session, name: str) -> Callable[[ModuleType], None]:
    """What to do once the module is imported."""
    kind_name, method = TRAINERS[name]

    def change(module: ModuleType) -> None:
        kind = getattr(module, kind_name, None)
        original = getattr(kind, method, None)
        if kind is None or original is None:
            return
        tried: set[int] = set()

        @functools.wraps(original)
        def trained(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not session.guarding:
                return original(self, *args, **kwargs)
            if getattr(self, "nanproof", None) is None and id(self) not in tried:
                tried.add(id(self))
                if _protect(session, self):
                    return getattr(self, method)(*args, **kwargs)  # which the adapter has replaced on this one object
            if getattr(self, "nanproof", None) is None:
                return original(self, *args, **kwargs)
            with session.away():
                return original(self, *args, **kwargs)

        setattr(kind, method, trained)

    return change


def _protect(session: Session, trainer: Any) -> bool:
    """Have the trainer guarded by its adapter; where that is not possible, its optimizer is watched as any other."""
    from nanproof.integrations import protect

    options = session.options
    try:
        guard = protect(trainer, policy=options.policy, run_dir=options.run_dir or "auto")
    except (NanproofError, ImportError) as error:
        session.say_once(f"{type(trainer).__name__} is watched as a plain loop: {error}")
        return False
    session.trainers.append((type(trainer).__name__, guard))
    return True
