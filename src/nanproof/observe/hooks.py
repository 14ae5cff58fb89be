"""Hooks that belong to one model in one process: a copy of the model, or one that was pickled, has them as nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class OwnHook:
    """Base of hooks. Copied or unpickled, it does nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


def _nothing() -> Callable[..., None]:
    return does_nothing


def does_nothing(*args: Any, **kwargs: Any) -> None:
    """What is left of a hook in a copy."""
    return
