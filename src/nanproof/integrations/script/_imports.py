"""What to do when a module is imported, if it ever is.

`nanproof run` has to change torch before the script uses it, and a trainer when the script imports one; a script that uses
neither must not pay for them. A finder in front of all others lets the usual ones find the module, and adds a word after it was
executed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Then = Callable[[ModuleType], None]


class AfterImport(MetaPathFinder):
    """Calls a function with a module once that has been executed; at once where it has been already."""

    def __init__(self, then: dict[str, Then]) -> None:
        self._then = then
        self._finding: set[str] = set()

    def install(self) -> None:
        sys.meta_path.insert(0, self)
        for name in list(self._then):
            module = sys.modules.get(name)
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                self._tell(name, module)

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self._then or name in self._finding:
            return None
        self._finding.add(name)
        try:
            for finder in sys.meta_path:
                spec = finder.find_spec(name, path, target) if finder is not self and hasattr(finder, "find_spec") else None
                if spec is not None:
                    if spec.loader is not None and hasattr(spec.loader, "exec_module"):
                        _follow(spec.loader, lambda module: self._tell(name, module))
                    return spec
        finally:
            self._finding.discard(name)
        return None

    def _tell(self, name: str, module: ModuleType) -> None:
        then = self._then.pop(name, None)
        if then is not None:
            then(module)


def _follow(loader: Loader, then: Then) -> None:
    """The loader stays the one it is, so that `__loader__` and what reads sources through it are as always."""
    execute: Any = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        del loader.exec_module
        execute(module)
        then(module)

    loader.exec_module = exec_module  # type: ignore[method-assign]
