"""Trainers with an adapter of their own, in a script that knows nothing of nanproof: protected when their loop begins.

The classes are changed after the script has imported them, and only then; while such a loop runs, the generic patches keep their
hands off.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

from nanproof._errors import AlreadyGuarded, NanproofError
from nanproof.integrations import automatic
from nanproof.integrations.huggingface._attach import follow_callbacks
from nanproof.integrations.script._session import Session

TRAINERS = {
    "transformers.trainer": ("Trainer", "train"),
    "lightning.pytorch.trainer.trainer": ("Trainer", "fit"),
    "pytorch_lightning.trainer.trainer": ("Trainer", "fit"),
}
"""The module, the class in it, and the method that trains."""


ENGINES = {"deepspeed.runtime.engine": ("DeepSpeedEngine", ("backward", "step"))}
"""Who takes steps in a way of its own, called by a loop of the script: protected as soon as it is made."""


def follow_engine(session: Session, name: str) -> Callable[[ModuleType], None]:
    """What to do once the module of an engine is imported."""
    kind_name, methods = ENGINES[name]

    def change(module: ModuleType) -> None:
        kind: Any = getattr(module, kind_name, None)
        if kind is None:
            return
        make = kind.__init__

        @functools.wraps(make)
        def made(self: Any, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            if session.guarding and type(self) is kind and _protect(session, self):
                automatic[self] = session.trainers[-1][1]

        kind.__init__ = made
        for method in methods:
            setattr(kind, method, _away(session, getattr(kind, method)))

    return change


def _away(session: Session, original: Callable[..., Any]) -> Callable[..., Any]:
    """Its optimizers are no business of the generic patches, guarded or not: they hold parts of parameters that differ from rank
    to rank."""

    @functools.wraps(original)
    def undisturbed(self: Any, *args: Any, **kwargs: Any) -> Any:
        with session.away():
            return original(self, *args, **kwargs)

    return undisturbed


def follow(session: Session, name: str) -> Callable[[ModuleType], None]:
    """What to do once the module is imported."""
    kind_name, method = TRAINERS[name]

    def change(module: ModuleType) -> None:
        kind = getattr(module, kind_name, None)
        if kind is not None and name == "transformers.trainer":
            # Now, so that it is inside the function below: a callback must find the trainer guarded with the user's options.
            follow_callbacks(kind)
        original = getattr(kind, method, None)
        if kind is None or original is None:
            return
        seen: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

        @functools.wraps(original)
        def trained(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not session.guarding:
                return original(self, *args, **kwargs)
            if self not in seen:
                seen[self] = _protect(session, self)
                if seen[self]:
                    return getattr(self, method)(*args, **kwargs)  # which the adapter may have replaced on this one object
            if not seen[self]:
                return original(self, *args, **kwargs)
            with session.away():
                return original(self, *args, **kwargs)

        setattr(kind, method, trained)

    return change


def _protect(session: Session, trainer: Any) -> bool:
    """Have the trainer guarded by its adapter, unless the script did; where that is not possible, its optimizer is watched as any
    other."""
    import torch

    from nanproof.integrations import protect

    options = session.options
    policy = options.policy
    if options.optimizer == "own" or (options.optimizer == "auto" and not torch.accelerator.is_available()):
        policy = replace(policy, switch_to_fused=False)
    try:
        guard = protect(trainer, policy=policy, run_dir=options.run_dir or "auto", observe=options.observe or None)
    except AlreadyGuarded:
        from nanproof.integrations.script._script_run import Tally

        session.tallies.append(Tally(type(trainer).__name__, path="the script guards it itself"))
        return True
    except (NanproofError, ImportError) as error:
        session.say_once(f"{type(trainer).__name__} is not guarded as a trainer, but its optimizers are, if they can be: {error}")
        return False
    session.trainers.append((type(trainer).__name__, guard))
    return True
