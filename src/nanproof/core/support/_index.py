"""The index of a run with several optimizers that have their own verdicts, as in a GAN.

The first optimizer writes into the run's folder, the others into `optimizer-2`, `optimizer-3`, ...
in it. `optimizers.json` in the run's folder lists them all, so that a reader shows one run, and
leaves out folders from earlier runs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from nanproof._access import read_json
from nanproof.core.support._files import reason, strict_json, write_whole

log = logging.getLogger("nanproof")

INDEX = "optimizers.json"
MOST = 64
"""Optimizers that a reader follows."""
_OWN = "."
_OTHER = re.compile(r"optimizer-[1-9]\d{0,5}")


def next_folder(run_dir: Path, used: Iterable[Path | None]) -> Path:
    """Return the folder for the next optimizer of a run. `used`: folders of the optimizers before it."""
    taken = {path for path in used if path is not None}
    names = (run_dir / f"optimizer-{number}" for number in range(2, len(taken) + 3))
    return next(path for path in (run_dir, *names) if path not in taken)


def write_index(run_dir: Path, optimizers: Sequence[tuple[Path, str]]) -> None:
    """Write the folder and the name of each optimizer. Remove the index of an earlier run if there
    is only one. A failure is logged, and does not stop the run."""
    path = run_dir / INDEX
    try:
        names = {run_dir: "", **dict(optimizers)}
        if len(names) == 1:
            path.unlink(missing_ok=True)
            return
        entries = [{"name": name, "folder": folder.relative_to(run_dir).as_posix()} for folder, name in names.items()]
        write_whole(path, strict_json({"v": 1, "optimizers": entries}))
    except OSError as error:
        log.warning("nanproof: %s cannot be written: %s. Reports show the first optimizer only", path, reason(error))


def read_index(run_dir: Path) -> list[tuple[Path, str]]:
    """Return the folder and the name of each optimizer of a run; nothing if there is no index.
    Folders outside the run's are not followed. Names are unique."""
    try:
        entries = read_json(run_dir / INDEX, 1 << 20)["optimizers"]
        found = {str(entry["folder"]): str(entry["name"])[:200] for entry in entries[:MOST]}
    except (OSError, ValueError, KeyError, TypeError):
        return []
    found = {folder: name for folder, name in found.items() if folder == _OWN or _OTHER.fullmatch(folder)}
    if _OWN not in found:
        return []
    names = list(found.values())
    return [
        (run_dir / folder, name if name and names.count(name) == 1 else f"{name} ({number})".strip())
        for number, (folder, name) in enumerate(found.items(), 1)
    ]
