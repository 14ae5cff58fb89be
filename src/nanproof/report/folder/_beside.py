"""What lies in and beside a run's folder: checkpoints with their state, and samples in quarantine. JSON only, and no torch."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanproof._access import open_regular, parse_json
from nanproof._text import shown

MOST = 200
_OURS = re.compile(r"step-(\d{8,})(?:-(\d+))?")
_TRAINERS = re.compile(r"checkpoint-(\d+)")
_SMALL = 1 << 20


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint, as far as it can be told without reading its weights: sizes are compared, checksums are not."""

    name: str
    step: int
    state: str
    """ "good", "candidate", "suspect" or "broken"."""
    size: int
    at: str
    why: str = ""
    """What is wrong with a broken one."""


def checkpoints(run: Path) -> list[Saved]:
    """Checkpoints of the run, by step: its own folder, `checkpoints` in it, and those a trainer keeps beside it."""
    found = []
    for folder in (run / "checkpoints", run, run.absolute().parent / "checkpoints"):
        found += [_ours(path, int(match[1])) for path, match in _named(folder, _OURS) if (path / "manifest.json").is_file()]
    for folder in (run, run.absolute().parent):
        found += [
            _trainers(path, int(match[1])) for path, match in _named(folder, _TRAINERS) if (path / "nanproof.json").is_file()
        ]
    return sorted(found, key=lambda saved: (saved.step, saved.name))[-MOST:]


def quarantine(run: Path) -> list[dict[str, Any]]:
    """The samples that are left out."""
    found = []
    for line in _data(run / "quarantine.jsonl").splitlines()[:MOST]:
        data = _object(line.decode("utf-8", errors="replace"))
        if isinstance(data.get("step"), int):
            known = {key: data.get(key) for key in ("index", "hash", "step", "cause", "at")}
            found.append({key: value if isinstance(value, int) else shown(value or "", 100) for key, value in known.items()})
    return found


def _named(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    try:
        paths = sorted(folder.iterdir())
    except OSError:
        return
    for path in paths:
        if (match := pattern.fullmatch(path.name)) and path.is_dir():
            yield path, match


def _ours(path: Path, step: int) -> Saved:
    manifest = _read(path / "manifest.json")
    files = manifest.get("files")
    size, why = 0, "" if isinstance(files, dict) and files else "its manifest names no files"
    for name, told in files.items() if isinstance(files, dict) else ():
        there = _bytes(path / name) if Path(name).name == name else None
        expected = told.get("bytes") if isinstance(told, dict) else None
        if there is None or there != expected:
            have = "is missing" if there is None else f"has {there} bytes, not {shown(expected, 40)}"
            why = f"{shown(name, 80)} {have}"
        size += there or 0
    state = "candidate"
    if (path / "good.json").is_file():
        state = "good"
        if _read(path / "good.json").get("manifest") != f"{zlib.crc32(_data(path / 'manifest.json')):08x}":
            why = why or "good.json speaks of another manifest"
    return Saved(path.name, step, "broken" if why else state, size, shown(manifest.get("at", ""), 40), why)


def _trainers(path: Path, step: int) -> Saved:
    state = _read(path / "nanproof.json").get("state")
    size = sum(_bytes(file) or 0 for file in sorted(path.glob("*"))[:1000])
    return Saved(path.name, step, state if state in ("good", "candidate", "suspect") else "broken", size, "")


def _read(path: Path) -> dict[str, Any]:
    return _object(_data(path).decode("utf-8", errors="replace"))


def _object(text: str) -> dict[str, Any]:
    try:
        data = parse_json(text)
    except ValueError:
        return {}
    return data if isinstance(data, dict) else {}


def _data(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(_SMALL)
    except OSError:
        return b""


def _bytes(path: Path) -> int | None:
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError:
        return None
