"""A folder that takes long to make is made once a test run, by whichever worker needs it first."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

try:
    import fcntl
except ImportError:  # no lock: every worker makes its own
    fcntl = None


def made_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> tuple[Path, Path]:
    """Return the folder that `make(folder)` filled, and a copy of it that belongs to the calling worker.

    The copy may be changed. A worker that comes second waits for the first one; if `make` raises, the next one makes it anew.
    """
    base = factory.getbasetemp()
    shared = (base.parent if fcntl and "PYTEST_XDIST_WORKER" in os.environ else base) / name
    with Path(f"{shared}.lock").open("w") as lock:
        if fcntl:
            fcntl.flock(lock, fcntl.LOCK_EX)
        done = Path(f"{shared}.done")
        if not done.exists():
            shutil.rmtree(shared, ignore_errors=True)
            shared.mkdir()
            make(shared)
            done.touch()
    own = factory.mktemp(name)
    shutil.copytree(shared, own, dirs_exist_ok=True)
    return shared, own
