"""The folder of an arm: its settings, the lock that lets one process work in it, and what `nanproof doctor` finds in its log."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nanproof import UsageError
from nanproof_recipes.library import FolderLock, findings, write_whole

BEGUN = "setting.json"
"""The file with the settings of an arm, written before training begins."""
RECORDS = "nanproof"
"""The folder that the guard of an arm writes to."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock an arm's folder: one process at a time works on it."""
    lock = FolderLock(folder, str(folder))
    try:
        yield
    finally:
        lock.release()


def doctors_word(log: Path) -> list[str]:
    """Return what `nanproof doctor` finds in the log of an arm, as notes."""
    return [f"doctor on its log: {found}" for found in findings(log)[:2] or ["nothing wrong"]]


def begin(folder: Path, told: Mapping[str, Any]) -> Path:
    """Create the folder, write the arm's settings into it, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / BEGUN, json.dumps(told, indent=1) + "\n")
    return folder


def begun(folder: Path, keys: Iterable[str]) -> dict[str, Any] | None:
    """Return the settings that an arm began with, or None if no arm began here. Settings without these keys are refused."""
    path = folder / BEGUN
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError:
        found = None
    if not isinstance(found, dict) or not set(keys) <= found.keys():
        raise UsageError(f"{path} is not of this recipe. Choose another --out")
    return found


def clear(folder: Path, keys: Iterable[str]) -> None:
    """Remove an arm, unless another process works on it. A folder that is not from this recipe is refused."""
    if begun(folder, keys) is not None:
        with locked(folder):
            pass
        shutil.rmtree(folder)


def check(folder: Path, told: Mapping[str, Any], anew: str = "train --again") -> None:
    """Raise UsageError unless the folder is empty or holds the same arm."""
    there = begun(folder, told)
    if there is not None:
        refuse_another(folder, there, told, anew)
    elif folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} holds something that is not of this recipe. Choose another --out")


def refuse_another(folder: Path, there: Mapping[str, Any], wanted: Mapping[str, Any], anew: str = "train --again") -> None:
    """Raise UsageError if the settings differ. `anew` is the command that trains the arm again."""
    if there != json.loads(json.dumps(wanted)):
        differ = sorted(k for k in {*there, *wanted} if there.get(k) != wanted.get(k))
        raise UsageError(
            f"{folder} was made with other settings ({', '.join(differ)}). `{anew}` does it anew, or choose another --out"
        )
