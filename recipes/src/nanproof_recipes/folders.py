"""An arm's own folder: what it was begun with, who works in it, and what `nanproof doctor` says of the log in it."""

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
"""The settings of an arm, there from its beginning."""
RECORDS = "nanproof"
"""Where the guard of an arm writes."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One process works on an arm."""
    lock = FolderLock(folder, str(folder))
    try:
        yield
    finally:
        lock.release()


def doctors_word(log: Path) -> list[str]:
    """What `nanproof doctor` says about the log of an arm."""
    return [f"doctor on its log: {found}" for found in findings(log)[:2] or ["nothing wrong"]]


def begin(folder: Path, told: Mapping[str, Any]) -> Path:
    """The folder, with the arm's settings in it."""
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / BEGUN, json.dumps(told, indent=1) + "\n")
    return folder


def begun(folder: Path, keys: Iterable[str]) -> dict[str, Any] | None:
    """The settings that a folder was begun with, which have these keys; None where no arm was begun in it."""
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
    """Removes an arm that was begun, unless somebody works on it. What is not of the recipe is refused, as by `begun`."""
    if begun(folder, keys) is not None:
        with locked(folder):
            pass
        shutil.rmtree(folder)


def check(folder: Path, told: Mapping[str, Any], anew: str = "train --again") -> None:
    """Nothing is there, or the same arm was begun: else it is refused."""
    there = begun(folder, told)
    if there is not None:
        refuse_another(folder, there, told, anew)
    elif folder.exists() and any(folder.iterdir()):
        raise UsageError(f"{folder} holds something that is not of this recipe. Choose another --out")


def refuse_another(folder: Path, there: Mapping[str, Any], wanted: Mapping[str, Any], anew: str = "train --again") -> None:
    """`anew`: the command that makes what is in the folder once more."""
    if there != json.loads(json.dumps(wanted)):
        differ = sorted(k for k in {*there, *wanted} if there.get(k) != wanted.get(k))
        raise UsageError(
            f"{folder} was made with other settings ({', '.join(differ)}). `{anew}` does it anew, or choose another --out"
        )
