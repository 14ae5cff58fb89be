"""What optimizers keep, in plain values: so that a checkpoint can be read back without executing anything.

Most of it is numbers and tensors already. Two things are not: dictionaries whose keys are parameters, which become their names,
and small objects of the optimizer's own package (GaLore's projector, Shampoo's preconditioner), which become what is in them.
Only classes of the packages that the optimizers of this run come from are ever made again, and only without calling them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

from torch import Tensor

from nanproof._errors import UsageError
from nanproof.core.support._inner import own_copy_of

_KEY = "parameter:"
_OBJECT = "object of"
_ENUM = "one of"


class Plainly:
    """Turns what a run's optimizers keep into plain values, and back."""

    def __init__(self, named: Mapping[str, Tensor], holders: Iterable[Any]) -> None:
        self._named = named
        self._names = {id(p): name for name, p in named.items()}
        self._packages = {type(holder).__module__.partition(".")[0] for holder in holders} - {"torch", "builtins"}

    def out(self, value: Any) -> Any:
        """A copy in plain values, where that is possible."""
        if isinstance(value, Tensor):
            return own_copy_of(value)
        if type(value) in (list, tuple):
            return type(value)(self.out(item) for item in value)
        if isinstance(value, dict):
            return {self._key(key): self.out(item) for key, item in value.items()}
        kind = type(value)
        if isinstance(value, Enum) and self._known(kind.__module__):
            return {_ENUM: [kind.__module__, kind.__qualname__], "name": value.name}
        if self._known(kind.__module__) and _is_bare(kind):
            return {_OBJECT: [kind.__module__, kind.__qualname__], "holds": self.out(vars(value))}
        return copy.deepcopy(value)

    def back(self, value: Any) -> Any:
        """The same, as it was."""
        if isinstance(value, Tensor):
            return own_copy_of(value)
        if type(value) in (list, tuple):
            return type(value)(self.back(item) for item in value)
        if not isinstance(value, dict):
            return copy.deepcopy(value)
        if _ENUM in value:
            return self._class(*value[_ENUM])[value["name"]]
        if _OBJECT in value:
            kind = self._class(*value[_OBJECT])
            if not _is_bare(kind):
                raise UsageError(f"the state of an optimizer holds a {kind.__name__} that cannot be made from what it holds")
            made = object.__new__(kind)
            made.__dict__.update(self.back(value["holds"]))
            return made
        return {self._parameter(key): self.back(item) for key, item in value.items()}

    def _key(self, key: Any) -> Any:
        return f"{_KEY}{self._names[id(key)]}" if isinstance(key, Tensor) and id(key) in self._names else key

    def _parameter(self, key: Any) -> Any:
        return self._named.get(key.removeprefix(_KEY), key) if isinstance(key, str) and key.startswith(_KEY) else key

    def _known(self, module: str) -> bool:
        return module.partition(".")[0] in self._packages

    def _class(self, module: str, name: str) -> type[Any]:
        kind: Any = sys.modules.get(module) if self._known(module) else None
        for word in name.split("."):
            kind = getattr(kind, word, None)
        if not isinstance(kind, type) or kind.__module__ != module:
            raise UsageError(f"the state of an optimizer holds a {module}.{name}, which none of this run's optimizers has")
        return kind


def _is_bare(kind: Any) -> bool:
    """Whether an object of this class is nothing but its attributes."""
    return kind.__new__ is object.__new__ and "__dict__" in dir(kind)
