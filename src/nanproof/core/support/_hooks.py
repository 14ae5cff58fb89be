"""Hooks on somebody's model. They belong to one model in one process: a copy of the model, or one
that was pickled, gets hooks that do nothing, because it is another model."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import Any


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


@functools.cache
def without_hooks(pickle_module: Any) -> Any:
    """Return a module that pickles as this one does, without these hooks. The model that is pickled keeps them: it may be
    training in another thread meanwhile."""

    class Pickler(pickle_module.Pickler):  # type: ignore[misc]
        def reducer_override(self, value: Any) -> Any:
            if type(value) is OrderedDict and any(isinstance(hook, OwnHook) for hook in list(value.values())):
                kept = [(key, hook) for key, hook in list(value.items()) if not isinstance(hook, OwnHook)]
                return OrderedDict(kept).__reduce__()
            inherited = getattr(super(), "reducer_override", None)
            return NotImplemented if inherited is None else inherited(value)

    module = ModuleType(pickle_module.__name__)
    vars(module).update(vars(pickle_module), Pickler=Pickler)
    return module


def _nothing() -> Callable[..., None]:
    return does_nothing


def does_nothing(*args: Any, **kwargs: Any) -> None:
    """What is left of a hook in a copy."""
    return
