"""NormFile: `norms.bin`, for the gradient norms of each step and what was observed, thinned to stay within a budget."""

from __future__ import annotations

import logging
import math
import os
import sys
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar

import torch

from nanproof._access import create, open_append, open_own, open_regular
from nanproof._records import Observed, StepRecord, strict_observed
from nanproof.core.support._files import sync
from nanproof.files._blocks import (
    ABSENT,
    ABSENT_CODE,
    HEADER,
    INF_CODE,
    LAST,
    LONGEST,
    LOWEST,
    NAN_CODE,
    NORMS,
    REFUSED,
    SPIKE,
    STEP,
    UNITS,
    BlockReader,
    near,
    packed,
    packed_columns,
    packed_header,
    thinned,
)

log = logging.getLogger("nanproof")

AROUND = 2
"""Steps on either side of a marked one whose norms are kept too."""
_GRAIN = 32768
"""Numbers that torch computes with in one thread."""
_MOST = torch.finfo(torch.float32).max


class NormFile:
    """`budget` returns how many bytes it may have now, `marks` the steps with incidents.

    Every step has a block while there is room for 1,024 of them. Otherwise each `every`-th has one, and so have marked steps and
    those around them. A file beyond its budget is thinned to three quarters of it: see `_blocks.thinned`.
    """

    PAUSE: ClassVar[float] = 1.0
    """Seconds without another attempt, after one failed."""
    DENSE: ClassVar[int] = 64
    """The newest steps that all have a block are at least twice as many, or there are no such steps."""

    def __init__(self, folder: Path, budget: Callable[[], int], marks: Callable[[], set[int]]) -> None:
        self._path = folder / NORMS
        self._budget, self._marks = budget, marks
        self._handle, self.size, self._number = -1, 0, 0
        self._off = False
        """Whether the names alone are too large."""
        self._every, self._dense, self._due, self._again = 1, True, 0, 0.0
        self._waiting: deque[StepRecord] = deque()
        """The newest steps, of which it is not known yet whether one of the next is marked."""
        self._wanted = 0
        """Steps to come that are near a marked one."""
        self._names: tuple[object, object, int] | None = None
        """Names and sites of the newest header, and its id; None before a header is written."""
        with suppress(FileNotFoundError):
            os.close(open_own(self._path, os.O_RDWR))  # a link or a pipe is refused
            self._take_stock()

    def add(self, records: Sequence[StepRecord]) -> None:
        """Write what is due of these steps. A disk that has no room now never gets them: their lines come later, these do not."""
        due: list[StepRecord] = []
        for record in records:
            self._waiting.append(record)
            if _flags(record):
                self._wanted = len(self._waiting) + AROUND
            while self._waiting and (self._wanted > 0 or self._dense or len(self._waiting) > AROUND):
                first = self._waiting.popleft()
                if self._wanted > 0 or self._dense or first.step % self._every == 0:
                    due.append(first)
                self._wanted = max(0, self._wanted - 1)
        self._write(due)

    def mark(self) -> None:
        """Write the newest steps and the next: there is an incident."""
        self._wanted = len(self._waiting) + AROUND
        self.add(())

    def close(self) -> None:
        """Write the last steps too."""
        self._write(list(self._waiting))
        self._waiting.clear()
        handle, self._handle = self._handle, -1
        with suppress(OSError):
            if handle >= 0:
                os.close(handle)

    def _write(self, records: list[StepRecord]) -> None:
        if not records or self._off or time.monotonic() < self._again:
            return
        try:
            for record, payload in zip(records, payloads(records), strict=True):
                header = self._header(record)
                if self._off:
                    return
                self._number += 1
                facts: dict[str, Any] = {
                    "number": self._number,
                    "step": record.step,
                    "time": record.time,
                    "flags": _flags(record),
                }
                if len(payload) <= LONGEST:
                    self._append(packed(STEP, payload, header=header, **facts))
            if self.size > max(self._budget(), self._due):
                self._due = self.size + self._budget() // 8  # in case it fails
                self._thin()
            elif 3 * self.size < self._budget():
                self._every = max(1, self._every // 2)
        except OSError as error:
            log.debug("nanproof: %s: %s", self._path, error)
            self._again = time.monotonic() + self.PAUSE

    def _header(self, record: StepRecord) -> int:
        """Return the id of the header with its names, which is written first if it is another."""
        sites = () if record.observed is None else record.observed.sites
        if self._names is not None and self._names[0] is record.names and self._names[1] is sites:
            return self._names[2]
        payload = packed_header(record.names, sites)
        self._off = not payload or len(payload) > self._budget() // 4
        if self._off:
            log.debug("nanproof: %s: %d names are too many", self._path, len(record.names))
            return 0
        identity = zlib.crc32(payload)
        self._number += 1
        self._append(packed(HEADER, payload, header=identity, number=self._number))
        self._names = record.names, sites, identity
        return identity

    def _append(self, data: bytes) -> None:
        if self._handle < 0:
            self._handle = open_append(self._path)
        try:
            left = data
            while left:
                left = left[os.write(self._handle, left) :]
        except OSError:
            self._names = None  # a part of a header, say
            with suppress(OSError):
                os.truncate(self._path, self.size)
            raise
        self.size += len(data)

    def _take_stock(self) -> None:
        """Find the end of what can be read, and cut what a kill left behind it."""
        reader = BlockReader()
        with open_regular(self._path) as file:
            for block, _ in reader.blocks(file):
                self._number = max(self._number, block.number)
            size = file.seek(0, 2)
        if reader.offset < size:
            os.truncate(self._path, reader.offset)
        self.size = reader.offset

    def _thin(self) -> None:
        """Write the file anew with what is kept of it."""
        with open_regular(self._path) as file:
            reader = BlockReader()
            blocks = [block for block, _ in reader.blocks(file)]
            headers = {block.header: block for block in blocks if block.kind == HEADER}
            found = [block for block in blocks if block.kind == STEP and block.header in headers]
            sizes = [block.size for block in found]
            room = self._budget() * 3 // 4 - sum(block.size for block in headers.values())
            dense = room // (16 * max(1, sum(sizes) // max(1, len(sizes))))
            dense = dense if dense >= self.DENSE else 0
            marked = near([b.step for b in found], [b.flags for b in found], self._marks(), AROUND)
            kept, every = thinned([b.step for b in found], sizes, marked, max(0, room), dense)
            stay = [block for block, keep in zip(found, kept, strict=True) if keep]
            wanted = {block.header for block in stay} | ({self._names[2]} if self._names else set())
            stay += [block for block in headers.values() if block.header in wanted]
            partial = self._path.with_name(f".{NORMS}.partial")
            try:
                with create(partial) as new:
                    for block in sorted(stay, key=lambda block: block.offset):
                        file.seek(block.offset)
                        new.write(file.read(block.size))
                    new.flush()
                    os.fsync(new.fileno())
                partial.replace(self._path)
            except BaseException:
                with suppress(OSError):
                    partial.unlink()
                raise
        with suppress(OSError):  # without it, a crash of the whole machine may bring back the file before it
            sync(self._path.parent)
        self._every, self._dense = every, bool(dense)
        handle, self._handle = self._handle, -1
        with suppress(OSError):
            if handle >= 0:
                os.close(handle)
        self.size, self._due = sum(block.size for block in stay), 0
        self._off = self.size > self._budget()


def _flags(record: StepRecord) -> int:
    return REFUSED * (record.action == "skipped") | SPIKE * bool(record.spike)


# -- numbers ---------------------------------------------------------------------------------------------------------------------


def payloads(records: Sequence[StepRecord]) -> list[bytes]:
    """The blocks of some steps. Their norms are converted together: each call of torch gives the interpreter away."""
    norms = [record.norms for record in records]
    codes = log_codes(norms)
    ends = list(accumulate(2 * len(each) for each in norms))
    found = []
    for record, end in zip(records, ends, strict=True):
        columns = [("norms", "l", codes[end - 2 * len(record.norms) : end])]
        if record.observed is not None:
            columns += _observed(record.observed)
        found.append(packed_columns(columns))
    return found


def _observed(observed: Observed) -> Iterable[tuple[str, str, bytes]]:
    yield "absmax", "f", floats(observed.absmax)
    for name in ("outputs", "gradients", "updates"):
        columns: dict[str, array[float]] = getattr(observed, name)
        for key, values in columns.items():
            yield f"{name}.{key}", "f", floats(values)
    for name, text in strict_observed(observed):
        yield name, "j", text.encode()


def log_codes(groups: Sequence[array[float]]) -> bytes:
    """Return the 16-bit codes of numbers: the inverse of `_blocks.decode_logs`. A number that is not 0 never becomes 0, and a
    finite one never Inf."""
    given = array("d")
    for group in groups:
        given.extend(group)
    codes = array("H", bytes(2 * len(given)))
    for start in range(0, len(given), _GRAIN):
        count = min(_GRAIN, len(given) - start)
        x = torch.frombuffer(given, dtype=torch.float64, count=count, offset=8 * start)
        code = x.log2().sub_(LOWEST).mul_(UNITS).round_().add_(1).clamp_(1, LAST)
        code.nan_to_num_(NAN_CODE).masked_fill_(x == math.inf, INF_CODE)
        code.masked_fill_(x == 0, 0).masked_fill_(x == ABSENT, ABSENT_CODE)
        torch.frombuffer(codes, dtype=torch.int16, count=count, offset=2 * start).copy_(code.to(torch.int32))
    return _little(codes)


def floats(given: array[float]) -> bytes:
    """Return numbers as float32. One that is finite stays so."""
    if not given:
        return b""
    values = array("f", bytes(4 * len(given)))
    x = torch.frombuffer(given, dtype=torch.float64)
    finite = x.clamp(-_MOST, _MOST).where(x.isfinite(), x)
    torch.frombuffer(values, dtype=torch.float32).copy_(finite)
    return _little(values)


def _little(values: array[Any]) -> bytes:
    if sys.byteorder == "big":
        values.byteswap()
    return values.tobytes()
