"""Look into checkpoints of any kind: NaN, Inf, damage. Nothing in a file is executed. `nanproof.scan(paths)` does it.

- `_scan` reads every tensor and returns a `_report`; `_found` finds checkpoints under a path; `_measure` is the fast pass.
- `_formats` reads safetensors and torch files; `_dcp` and `_chunks` read torch.distributed.checkpoint folders.
- `_manifest` knows nanproof's own checkpoints; `_inside` keeps names within a folder.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanproof.scan._report import ScanReport


class _Callable(ModuleType):
    """Importing this package sets `nanproof.scan` to it, where users expect the function: so it can be called as one."""

    def __call__(self, *args: Any, **kwargs: Any) -> ScanReport:
        from nanproof.scan._scan import scan

        return scan(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
