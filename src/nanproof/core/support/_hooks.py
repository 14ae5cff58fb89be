"""Hooks on somebody's model. They belong to one model in one process: a copy of the model, or one
that was pickled, gets hooks that do nothing, because it is another model."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


class OwnHook:
    """Base of hooks. Copied or unpickled, it does nothing."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _nothing, ()


class Hook(OwnHook):
    """Calls a method of its owner, as long as there is one."""

    def __init__(self, owner: Any, method: Callable[..., Any]) -> None:
        """`method`: a bound method of `owner`, or any function that gets the owner's arguments."""
        self._owner, self._function = weakref.ref(owner), method.__func__ if hasattr(method, "__func__") else method

    def __call__(self, *args: Any) -> Any:
        owner = self._owner()
        return None if owner is None else self._function(owner, *args)


@contextmanager
def without_hooks(model: nn.Module) -> Iterator[None]:
    """While open, a model has none of these hooks."""
    tables = [
        table
        for module in model.modules()
        for table in module.__dict__.values()
        if isinstance(table, OrderedDict) and any(isinstance(hook, OwnHook) for hook in table.values())
    ]
    saved = [(table, list(table.items())) for table in tables]
    for table in tables:
        for key in [key for key, hook in table.items() if isinstance(hook, OwnHook)]:
            del table[key]
    try:
        yield
    finally:
        for table, items in saved:
            table.clear()
            table.update(items)


def _nothing() -> Callable[..., None]:
    return does_nothing


def does_nothing(*args: Any, **kwargs: Any) -> None:
    """What is left of a hook in a copy."""
    return
