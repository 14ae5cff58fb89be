"""Look into checkpoints of any kind: NaN, Inf, damage. Nothing in a file is executed. `nanproof.scan(paths)` does it.

- `_scan` reads every tensor and returns a `_report`; `_found` finds checkpoints under a path; `_measure` is the fast pass.
- `_formats` reads safetensors and torch files; `_dcp` and `_chunks` read torch.distributed.checkpoint folders.
- `_torch_files` loads what torch.save wrote, after `_archives` and `_pickles` have looked at what the file asks for.
- `_manifest` knows nanproof's own checkpoints; `_inside` keeps names within a folder.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanproof.scan._report import FileReport, ScanReport


class _Callable(ModuleType):
    """Importing this package sets `nanproof.scan` to it, where users expect the function: so it can be called as one."""

    def __call__(
        self,
        paths: Iterable[str | Path],
        *,
        denormals: bool = False,
        checksums: bool = False,
        progress: Callable[[FileReport], None] | None = None,
    ) -> ScanReport:
        from nanproof.scan._scan import scan

        return scan(paths, denormals=denormals, checksums=checksums, progress=progress)

    def __reduce__(self) -> tuple[Any, ...]:
        return _function, ()


def _function() -> Callable[..., ScanReport]:
    """Return what a pickle of `nanproof.scan` stands for."""
    from nanproof.scan._scan import scan

    return scan


sys.modules[__name__].__class__ = _Callable
