"""Checkpoints that a trainer writes: which is whole, readable and finite, and which of several to resume from.

A folder is marked in `nanproof.json`: "saving" before the trainer writes into it, and with the files it consists of once all
are there. A kill in between leaves the first mark. A folder without a mark was written without nanproof, and its files decide.
Nothing in a file is executed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanproof._access import own_folder, read_json, remove
from nanproof._errors import NanproofError
from nanproof._text import one_line, printable
from nanproof.core.support._files import reason, strict_json, write_whole
from nanproof.scan._report import FileReport
from nanproof.scan._scan import scan

log = logging.getLogger("nanproof")

MARK = "nanproof.json"
SAVING = "saving"
PARTIAL = "its save was not finished"


@dataclass(frozen=True, slots=True)
class Fault:
    """Why a checkpoint is not resumed from."""

    reason: str
    loads: bool = False
    """Whether the trainer could load it all the same: then a user who names it gets it."""


Faults = Callable[[Path], Iterator[Fault]]
"""What is wrong with a checkpoint, the certain and cheap to find first."""


# -- marks -----------------------------------------------------------------------------------------------------------------------


def begin(folder: Path) -> None:
    """Say that this folder is being saved to."""
    try:
        own_folder(folder)
        for path in folder.iterdir():  # the trainer would write through a link, and wait for a pipe forever
            if path.is_symlink() or not (path.is_file() or path.is_dir()):
                remove(path)
    except OSError as error:
        log.warning("nanproof: %s cannot be marked: %s", folder.name, reason(error))
        return
    _write(folder, {"version": 1, "state": SAVING})


def finish(folder: Path, state: str, listed: Callable[[str], bool], **facts: Any) -> None:
    """Say that everything is there. `listed`: whether a file belongs to what must be there later, by its name in the folder."""
    files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    change(folder, state, files=[name for name in files if listed(name)], **facts)


def change(folder: Path, state: str, **facts: Any) -> None:
    """Give a folder another state. What else its mark says stays, unless it is given."""
    if folder.is_dir():
        _write(folder, {**mark(folder), "version": 1, "state": state, **facts})


def _write(folder: Path, facts: dict[str, Any]) -> None:
    """A mark that cannot be written does not stop the run. If the disk is the reason, the trainer's own save says so."""
    try:
        write_whole(folder / MARK, strict_json(facts))
    except (OSError, ValueError) as error:
        log.warning("nanproof: %s cannot be marked: %s", folder.name, reason(error))


def mark(folder: Path) -> dict[str, Any]:
    """What a folder's mark says; nothing where there is none, or where it is damaged."""
    try:
        read = read_json(folder / MARK)
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) else {}


def unfinished(folder: Path) -> bool:
    """Whether a save into this folder was cut off, perhaps before its mark was there."""
    return mark(folder).get("state") == SAVING or all(path.name.startswith(".") for path in folder.glob("*"))


def listed(folder: Path) -> list[str] | None:
    """The files that a folder's mark names; None where there is no such list."""
    names = mark(folder).get("files")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else None


# -- judging ---------------------------------------------------------------------------------------------------------------------


def marked_faults(folder: Path) -> Iterator[Fault]:
    """What the mark says, and files that it names and that are gone."""
    if unfinished(folder):
        yield Fault(PARTIAL, loads=True)
    if mark(folder).get("state") == "suspect":
        yield Fault("the run had gone wrong before it", loads=True)
    for name in listed(folder) or []:
        if not os.path.lexists(folder / name):
            yield Fault(f"{printable(name)} is missing", loads=True)


def contents_faults(
    paths: Sequence[Path], reading: Callable[[], AbstractContextManager[Any]] = nullcontext, refuses: bool = True
) -> Iterator[Fault]:
    """What a scan of these files and folders finds: damage, NaN and Inf, and in the files more than plain values. `reading`:
    the classes that the trainer itself allows in them. `refuses`: whether it refuses others."""
    for path in paths:
        try:
            with reading():
                report = scan([path])
        except (NanproofError, OSError) as error:
            yield Fault(one_line(error, 200))
            continue
        except Exception as error:  # it was loaded, and holds a kind of tensor that cannot be measured: nothing speaks against it
            log.info("nanproof: %s was not looked into: %s", printable(path.name), one_line(error, 200))
            continue
        for checkpoint in report.checkpoints:
            # Beside others in a folder it may be the user's own, which nobody loads.
            own = not checkpoint.path.is_dir()
            yield from (
                fault for file in checkpoint.files for fault in _file_faults(file, refuses and (own or file.path.is_dir()))
            )


def _file_faults(file: FileReport, refuses: bool) -> Iterator[Fault]:
    name = printable(file.path.name)
    if file.status == "unreadable" or (file.status == "refused" and refuses):
        yield Fault(f"{name}: {one_line(file.why, 200)}")
    elif file.status == "bad":
        tensor = next(tensor.name for tensor in file.tensors if tensor.bad)
        yield Fault(f"{name} holds NaN or Inf in {one_line(tensor, 200)}", loads=True)


def json_fault(path: Path, most: int = 1 << 28) -> tuple[Any, str]:
    """What a JSON file holds, and why it cannot be read: one of the two is empty. NaN and Infinity are allowed, as Python writes
    them."""
    try:
        return read_json(path, most), ""
    except FileNotFoundError:
        return None, f"{path.name} is missing"
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return None, f"{path.name}: {one_line(why, 200)}"


def newest_good(newest_first: Iterable[Path], faults: Faults) -> tuple[Path | None, list[tuple[Path, Fault]]]:
    """The first checkpoint without a fault, and those that were passed over before it, which is logged."""
    passed: list[tuple[Path, Fault]] = []
    for path in newest_first:
        fault = next(faults(path), None)
        if fault is None:
            return path, passed
        log.warning("nanproof: passed over %s: %s", printable(path.name), fault.reason)
        passed.append((path, fault))
    return None, passed


def delete(folder: Path, first: str) -> None:
    """Delete a checkpoint. The file without which none is whole goes first: a kill leaves nothing that looks like one."""
    with suppress(OSError):
        (folder / first).unlink()
    remove(folder)
