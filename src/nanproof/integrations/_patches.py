"""Methods replaced on objects, classes and modules, and put back: how an adapter gets in between without a subclass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any


class Patches:
    """What was replaced, in order. Undone by `undo`, or at the end of a `with`."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, bool, Any] | Callable[[], object]] = []

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> Callable[..., Any]:
        """Calls of `owner.name(...)` become `wrapper(original, ...)`. Returns the original."""
        original: Callable[..., Any] = getattr(owner, name)

        @functools.wraps(original)
        def replaced(*args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        self.set(owner, name, replaced)
        return original

    def method(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """As `wrap`, by a bound method: schedules look for the function in it. Keeps the mark that they put on a step."""
        original: Callable[..., Any] = getattr(owner, name)

        def replaced(_: Any, *args: Any, **kwargs: Any) -> Any:
            return wrapper(original, *args, **kwargs)

        if hasattr(original, "_wrapped_by_lr_sched"):
            replaced._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        self.set(owner, name, MethodType(replaced, owner))

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Give an attribute another value for a while."""
        own = name in vars(owner)
        self._undo.append((owner, name, own, vars(owner).get(name)))
        setattr(owner, name, value)

    def later(self, put_back: Callable[[], object]) -> None:
        """Something that was changed in another way, and how it is put back."""
        self._undo.append(put_back)

    def undo(self) -> None:
        """Put everything back. Where one thing cannot be put back, the others are, and then its error is raised."""
        try:
            while self._undo:
                done = self._undo.pop()
                if callable(done):
                    done()
                    continue
                owner, name, own, before = done
                if own:
                    setattr(owner, name, before)
                else:
                    delattr(owner, name)
        finally:
            if self._undo:
                self.undo()

    def __enter__(self) -> Patches:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()
