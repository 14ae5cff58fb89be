"""LineFile: a file of lines that only grows, and that goes on after the disk was full."""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

from nanproof._access import OddFile, open_append, open_own
from nanproof._records import VERSION, line

log = logging.getLogger("nanproof")

_LONGEST = 256 << 20
"""Bytes of the longest line that is looked for at the end of a file."""


class LineFile:
    """A file of lines that only grows, and that goes on after the disk was full.

    Lines that cannot be written are kept in memory, up to `KEPT` bytes of them, and written as soon as there is room. Lines
    beyond that are lost, and a line of the kind "gap" says which. No line is ever cut in the middle of the file.
    """

    KEPT: ClassVar[int] = 4 << 20
    PAUSE: ClassVar[float] = 1.0
    """Seconds from one attempt to write to the next, while the disk is full."""
    QUIET: ClassVar[float] = 60.0
    """Seconds without another warning: a disk can be full again and again."""

    def __init__(self, path: Path, *, later: bool = False) -> None:
        self.path = path
        self.size = 0
        """Bytes in the file, about."""
        self._handle = -1 if later else self._opened()
        self._done = 0
        """Bytes of the last write that are in the file."""
        self._kept: deque[bytes] = deque()
        self._held = 0
        self._lost: tuple[int | None, int | None, int] | None = None
        """First step, last step and number of the records that are lost."""
        self._why = ""
        """Why nothing can be written now; empty while it can."""
        self._again = 0.0
        self._warned = -math.inf
        self._told = False
        """Whether there was a warning about this time that the disk is full."""

    def add(self, text: str, step: int | None = None) -> bool:
        """Write one or more whole lines, or keep them until there is room. Returns False if they are lost."""
        return self.add_all([(text.encode(), step)])

    def add_all(self, lines: Sequence[tuple[bytes, int | None]]) -> bool:
        """The same for many, each with its step, in one go. Returns False if one of them is lost."""
        if self._why and (time.monotonic() < self._again or not self._go_on()):
            kept = [self._keep(data, step) for data, step in lines]
            return all(kept)
        try:
            self._write(b"".join([data for data, _ in lines]))
        except OSError as error:
            written, kept = self._done, []
            self._stop(error)
            for data, step in lines:
                written -= len(data)
                if written < 0:  # a line of which a part was written was cut off again
                    kept.append(self._keep(data, step))
            return all(kept)
        return True

    def close(self) -> None:
        """Try a last time to write what is kept."""
        if self._why and not self._go_on():
            log.warning("nanproof: %s is incomplete: %s. %d records are missing", self.path, self._why, self._missing)
        handle, self._handle = self._handle, -1
        try:
            if handle >= 0:
                os.close(handle)
        except OSError as error:  # a network disk may find out only now that it is full
            log.warning("nanproof: %s is incomplete: %s", self.path, error.strerror)

    def lose(self, first: int, last: int, count: int) -> None:
        """Write the line about records that were lost before they came here: the disk was too slow for them."""
        gap = {"kind": "gap", "first": first, "last": last, "lines": count, "time": now(), "why": "The disk was too slow"}
        self.add(line({"v": VERSION, **gap}))

    @property
    def waits(self) -> bool:
        """Whether nothing can be written now."""
        return bool(self._why) or self._handle < 0

    def reopen(self) -> None:
        """Go on in the file that is now in its place."""
        handle, self._handle = self._handle, -1
        with suppress(OSError):
            os.close(handle)
        with suppress(OSError):  # if it cannot be opened now, the next line tries again
            self._handle = self._opened()

    @property
    def _missing(self) -> int:
        return len(self._kept) + (self._lost[2] if self._lost else 0)

    def _opened(self) -> int:
        cut_broken_line(self.path)
        handle = open_append(self.path)
        self.size = os.fstat(handle).st_size
        return handle

    def _write(self, data: bytes) -> None:
        self._done = 0
        if self._handle < 0:
            self._handle = self._opened()
        while data:  # a disk that fills up takes a part first, and gives its reason with the next call
            written = os.write(self._handle, data)
            self._done += written
            self.size += written
            data = data[written:]

    def _keep(self, data: bytes, step: int | None) -> bool:
        if step is None or (not self._lost and self._held + len(data) <= self.KEPT):
            self._kept.append(data)
            self._held += len(data)
            return True
        first, _, count = self._lost or (step, step, 0)
        self._lost = first, step, count + 1
        return False

    def _stop(self, error: OSError) -> None:
        """Close the file and cut what was written of a line. It is opened again with the next attempt."""
        if not self._why:
            self._told = time.monotonic() - self._warned >= self.QUIET
        if not self._why and self._told:
            self._warned = time.monotonic()
            what = "Training goes on, and lines are kept in memory until there is room"
            log.warning("nanproof: %s cannot be written: %s. %s", self.path, error.strerror, what)
        self._why = error.strerror or type(error).__name__
        self._again = time.monotonic() + self.PAUSE
        handle, self._handle = self._handle, -1
        with suppress(OSError):
            if handle >= 0:
                os.close(handle)
            cut_broken_line(self.path)

    def _go_on(self) -> bool:
        """Write what was kept, and the line about what was lost."""
        count = self._missing
        try:
            while self._kept:
                self._write(self._kept[0])
                self._held -= len(self._kept.popleft())
            if self._lost:
                first, last, lines = self._lost
                gap = {"kind": "gap", "first": first, "last": last, "lines": lines, "time": now(), "why": self._why}
                self._write(line({"v": VERSION, **gap}).encode())
        except OSError as error:
            self._stop(error)
            return False
        if self._told:
            lost = self._lost[2] if self._lost else 0
            log.warning("nanproof: %s is written again: %d records were late, %d are missing", self.path, count - lost, lost)
        self._lost, self._why = None, ""
        return True


def now() -> float:
    """Return the time as a line has it."""
    return round(time.time(), 3)


def cut_broken_line(path: Path) -> None:
    """Remove the half line that a killed run left at the end: what follows it would be unreadable. A file that ends well is not
    touched: another process may have appended to it since it was looked at. Raises OSError on what is not a regular file."""
    try:
        handle = open_own(path, os.O_RDWR)
    except FileNotFoundError:
        return
    with os.fdopen(handle, "rb+") as file:
        size = end = file.seek(0, 2)
        while end > 0:
            if size - end > _LONGEST:
                raise OddFile(errno.EFBIG, f"its last line has more than {_LONGEST:,} bytes", str(path))
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                if start + newline + 1 < size:
                    file.truncate(start + newline + 1)
                return
            end = start
        if size:
            file.truncate(0)
