"""The parts of a run's steps: `steps.jsonl`, which is written, and `steps/000001.jsonl.gz`, ..., which were written before it.

The first line of `steps.jsonl` says which part it is; without such a line it is the first. A part in the folder that is not below
that number is a copy, left by a kill in the middle of a rotation, and does not count.
"""

from __future__ import annotations

import gzip
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, cast

from nanproof._access import SMALL, open_regular, whole_lines

STEPS = "steps.jsonl"
PARTS = "steps"
MOST_PART = 6 << 20
"""Bytes of a part that is compressed; readers take no more, and count a short line as `_SHORT` bytes."""
THINNED = b'{"v":3,"kind":"thinned"'
"""How the first line of a part begins of which ordinary steps are left out."""

_SHORT = 64
_NUMBER = re.compile(rb'^\{"v":\d{1,9},"kind":"part","part":(\d{1,9})[,}]', re.MULTILINE)
_NEAR_START = 4096
"""Bytes in which that line is looked for: one that is broken may have come before it."""
_NAME = re.compile(r"(\d{6,9})\.jsonl(\.gz)?")


def number_of(file: BinaryIO) -> int:
    """Return which part an open `steps.jsonl` is. Leaves the file at its start."""
    file.seek(0)
    match = _NUMBER.search(file.read(_NEAR_START))
    file.seek(0)
    return int(match[1]) if match else 1


def part_path(folder: Path, number: int, *, packed: bool = True) -> Path:
    """Return where a part lies once another one is written."""
    return folder / PARTS / f"{number:06d}.jsonl{'.gz' if packed else ''}"


def earlier(folder: Path, below: int) -> list[tuple[int, Path]]:
    """Return the parts before the part with the number `below`, oldest first."""
    found: dict[int, Path] = {}
    with suppress(OSError):
        for name in sorted(os.listdir(folder / PARTS)):  # the compressed one of a number comes last
            match = _NAME.fullmatch(name)
            if match and int(match[1]) < below:
                found[int(match[1])] = folder / PARTS / name
    return sorted(found.items())


def is_part(path: Path) -> bool:
    """Return whether a file is an earlier part of the steps in the folder above."""
    return path.parent.name == PARTS and _NAME.fullmatch(path.name) is not None and (path.parents[1] / STEPS).is_file()


def part_lines(path: Path, start: int = 0) -> Iterator[tuple[bytes, int]]:
    """Whole lines of an earlier part from an offset on, each with the offset after it, as far as the part can be read."""
    with suppress(OSError, EOFError, zlib.error), open_regular(path) as raw:
        packed = path.name.endswith(".gz")
        file = cast("BinaryIO", gzip.GzipFile(fileobj=raw)) if packed else raw
        file.seek(start)
        left, before = MOST_PART, start
        for text in whole_lines(file, MOST_PART if packed else SMALL):
            end = file.tell()
            left -= max(end - before, _SHORT)  # of a line that is too long, the text is empty
            before = end
            if packed and left < 0:
                return
            yield text, end


def step_lines(path: Path) -> Iterator[bytes]:
    """Whole lines of all parts of a run, given its `steps.jsonl`. Raises OSError if that cannot be read."""
    with open_regular(path) as file:
        if path.name == STEPS:
            for _, part in earlier(path.parent, number_of(file)):
                for text, _ in part_lines(part):
                    yield text
        yield from whole_lines(file)
