"""Pause Python's garbage collector while many objects are made that all stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0
"""Pauses that are open, one inside the other."""


@contextmanager
def no_collections() -> Iterator[None]:
    """Collect no cycles while this is open, and at its end only those made lately.

    A run of a large model makes 100,000 objects in a second, hardly any of them garbage. The full collections that this sets off
    walk through every object of the program, and took a quarter of the time of a diagnosis. What holds the memory of a run (a
    traceback, a graph) is young: it is freed before the next run. Nothing is done where the user has turned the collector off.
    """
    global _depth
    if not (_depth or gc.isenabled()):
        yield
        return
    _depth += 1
    try:
        gc.disable()
        yield
    finally:
        _depth -= 1
        try:
            gc.collect(0)
        finally:  # whenever Ctrl-C comes
            if not _depth:
                gc.enable()
