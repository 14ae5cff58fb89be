"""StepFile: `steps.jsonl`, which begins anew when it has grown. What was in it becomes a compressed part beside it."""

from __future__ import annotations

import gzip
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from nanproof._access import check_own, open_regular, own_folder
from nanproof._records import VERSION, line
from nanproof.core.journal._lines import LineFile, now
from nanproof.core.support._files import sync, write_whole
from nanproof.files._parts import MOST_PART, PARTS, STEPS, earlier, number_of, part_path

log = logging.getLogger("nanproof")

A_STEP = 72
"""Bytes a step that a part takes at most, once it is compressed."""
NEAR = 10
"""Lines on either side of a refused step, a spike or an incident that are never left out; nor are so many at both ends of a part,
since it may be in the next one."""

_STEP = re.compile(rb'\{"v":\d+,"kind":"step","step":(\d{1,15}),')
_ACTION = re.compile(rb'"action":"(\w{1,40})"')
_MARKED = re.compile(rb'"action":"skipped"|"spike":true|:"-?(?:nan|inf)"')


class StepFile:
    """A `LineFile` in parts. `marks` returns the steps that have incidents."""

    SMALLEST: ClassVar[int] = 128 << 10
    """Bytes of a part, before it is compressed; and no less than a sixth of all earlier parts together."""
    LARGEST: ClassVar[int] = 4 << 20

    def __init__(self, folder: Path, marks: Callable[[], set[int]]) -> None:
        check_own(folder / PARTS)
        self.lines = LineFile(folder / STEPS)
        self._folder, self._marks = folder, marks
        with open_regular(self.lines.path) as file:
            self._number = number_of(file)
        newest = max((number for number, _ in earlier(folder, sys.maxsize)), default=0)
        if newest > self._number:  # the line that says which part this is has been lost: those that are there stay
            self._number = newest + 1
        self._earlier = sum(path.stat().st_size for _, path in earlier(folder, self._number))
        self._due = 0
        """Bytes before which no rotation is tried again."""

    @property
    def total(self) -> int:
        """Bytes of all parts."""
        return self._earlier + self.lines.size

    def close(self) -> None:
        """Write what is kept, and close the file."""
        self.lines.close()

    def rotate(self) -> bool:
        """Begin the next part if this one has grown. Return whether it was done: a full disk puts it off."""
        limit = max(min(max(self.SMALLEST, self._earlier // 6), self.LARGEST), self._due)
        path, size, kept = self.lines.path, self.lines.size, 0
        if size < limit or self.lines.waits:
            return False
        try:
            kept = self._put_away()
            part = line({"v": VERSION, "kind": "part", "part": self._number + 1, "time": now()})
            write_whole(path, part)  # atomic: the part before it is in its place already, or this one goes on
        except OSError as error:
            log.debug("nanproof: %s goes on as it is: %s", path, error)
            self._due = size + self.SMALLEST
            if not self._is_begun():
                return False
        self._earlier, self._number, self._due = self._earlier + kept, self._number + 1, 0
        self.lines.reopen()
        return True

    def _is_begun(self) -> bool:
        """Return whether the next part is in its place, though something went wrong after that: the folder was not flushed."""
        with suppress(OSError), open_regular(self.lines.path) as file:
            return number_of(file) == self._number + 1
        return False

    def _put_away(self) -> int:
        """Write the compressed part; return how many bytes it has. A file of an earlier version can be larger than a part may be,
        and is moved as it is."""
        own_folder(self._folder / PARTS)
        path, size = self.lines.path, self.lines.size
        if size > MOST_PART:
            plain = part_path(self._folder, self._number, packed=False)
            plain.unlink(missing_ok=True)
            os.link(path, plain, follow_symlinks=False)
            sync(plain.parent)
            return size
        with open_regular(path) as file:
            data = file.read(MOST_PART)
        packed = compressed(data, self._marks)
        write_whole(part_path(self._folder, self._number), packed)
        return len(packed)


def compressed(data: bytes, marks: Callable[[], set[int]]) -> bytes:
    """Return a part compressed: with all of its steps if they fit into `A_STEP` bytes each, else with every second ordinary one,
    every fourth, and so on."""
    packed = gzip.compress(data, 6, mtime=0)
    lines = data.splitlines(keepends=True)
    steps = [int(match[1]) if (match := _STEP.match(text)) else None for text in lines]
    room = A_STEP * sum(step is not None for step in steps)
    every = 1
    while room and len(packed) > room and every < 1 << 12:
        every *= 2
        kept = chosen(lines, steps, marks(), every)
        rest = [text for text, keep in zip(lines, kept, strict=True) if keep]
        packed = gzip.compress(b"".join([_note(lines, kept, every), *rest]), 6, mtime=0)
    return packed


def chosen(lines: Sequence[bytes], steps: Sequence[int | None], marks: set[int], every: int) -> list[bool]:
    """Choose the lines that are kept: all that are not steps, every `every`-th step, and all near a refused step, a spike, an
    incident or a number that is not finite. Near means near in the file: a run can go back."""
    marked = [step is not None and (step in marks or _MARKED.search(text)) for text, step in zip(lines, steps, strict=True)]
    near = [False] * len(lines)
    for i in (-1, *(i for i, mark in enumerate(marked) if mark), len(lines)):
        for j in range(max(0, i - NEAR), min(len(lines), i + NEAR + 1)):
            near[j] = True
    return [step is None or close or step % every == 0 for step, close in zip(steps, near, strict=True)]


def _note(lines: Sequence[bytes], kept: Sequence[bool], every: int) -> bytes:
    """The first line of a thinned part: how many steps of each action are left out."""
    actions: dict[str, int] = {}
    for data, keep in zip(lines, kept, strict=True):
        if not keep and (match := _ACTION.search(data)):
            actions[match[1].decode()] = actions.get(match[1].decode(), 0) + 1
    return line({"v": VERSION, "kind": "thinned", "every": every, "left_out": actions, "time": now()}).encode()
