"""The way of records to the host, and from there to the disk.

`Courier` carries a step's vector from the device through pinned memory; reading it later waits only if the device is more
than the lag behind, in which case it still has that many steps of work queued. `Journal` appends lines of JSON.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from nanproof._access import OddFile, check_own, open_append, open_own
from nanproof._records import VERSION, Forecast, Incident, StepRecord, line
from nanproof.core.support._files import FolderLock, not_writable

log = logging.getLogger("nanproof")

_LONGEST = 256 << 20
"""Bytes of the longest line that is looked for at the end of a file."""


class Courier:
    """Hands out parcels: call one to get the numbers."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._free: deque[tuple[Tensor, Any]] = deque()
        self.waits = 0
        """How often the device was more than the lag behind when its numbers were due."""

    def send(self, vector: Tensor) -> Callable[[], list[float]]:
        if not self._cuda:
            return vector.tolist
        host, event = self._slot(vector)
        host.copy_(vector, non_blocking=True)
        event.record()

        def read() -> list[float]:
            if not event.query():
                self.waits += 1
                event.synchronize()
            values: list[float] = host.tolist()
            self._free.append((host, event))
            return values

        return read

    def _slot(self, vector: Tensor) -> tuple[Tensor, Any]:
        while self._free:
            host, event = self._free.popleft()
            if host.shape == vector.shape and host.dtype == vector.dtype:
                return host, event
        return torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True), torch.cuda.Event()


class Journal:
    """`steps.jsonl`, `incidents.jsonl` and `forecasts.jsonl` in a run's folder; does nothing without one.

    `steps.jsonl` says when the run was opened, on what, and when it was closed. A full disk never stops the run: see `LineFile`.
    """

    def __init__(self, folder: str | Path | None, about: Callable[[], dict[str, Any]] = dict) -> None:
        self._files: dict[str, LineFile] = {}
        self._header: tuple[Any, ...] = ()
        self._lock: FolderLock | None = None
        if folder is None:
            return
        self.folder = Path(folder)
        try:
            if (self.folder.parent / "steps.jsonl").exists():
                check_own(self.folder)  # a link inside a run's folder; elsewhere a link to a folder is the user's choice
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.folder, f"Guard(run_dir={str(folder)!r})")
            check_own(self.folder / "forecasts.jsonl")
            for name in ("steps", "incidents"):
                self._files[name] = LineFile(self.folder / f"{name}.jsonl")
        except OSError as error:
            self._close_files()
            raise not_writable(f"Guard(run_dir={str(folder)!r})", error) from error
        self._files["steps"].add(line({"v": VERSION, "kind": "opened", "time": _now(), "about": _facts(about)}))

    def step(self, record: StepRecord) -> None:
        if "steps" not in self._files:
            return
        sites = () if record.observed is None else record.observed.sites
        text = record.to_line()
        if not self._header or record.names is not self._header[0] or sites is not self._header[1]:
            self._header = record.names, sites
            header = {"v": VERSION, "kind": "header", "names": list(record.names)}
            text = line({**header, "sites": list(sites)} if sites else header) + text
        if not self._files["steps"].add(text, record.step):
            self._header = ()  # it may be lost, so the next step that is written brings it again

    def incident(self, incident: Incident) -> None:
        if "incidents" in self._files:
            self._files["incidents"].add(line({**incident.to_json(), "time": _now()}), incident.step)

    def forecast(self, forecast: Forecast) -> None:
        """The file is made with the first of them: most runs have none."""
        if "incidents" not in self._files:
            return
        if "forecasts" not in self._files:
            self._files["forecasts"] = LineFile(self.folder / "forecasts.jsonl", later=True)
        self._files["forecasts"].add(line({**forecast.to_json(), "time": _now()}), forecast.step)

    def close(self) -> None:
        if "steps" in self._files:
            self._files["steps"].add(line({"v": VERSION, "kind": "closed", "time": _now()}))
        self._close_files()

    def _close_files(self) -> None:
        for name in list(self._files):
            self._files.pop(name).close()
        if self._lock is not None:
            self._lock.release()


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
        self._path = path
        self._handle = -1 if later else self._opened()
        self._kept: deque[bytes] = deque()
        self._size = 0
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
        data = text.encode()
        if self._why and (time.monotonic() < self._again or not self._go_on()):
            return self._keep(data, step)
        try:
            self._write(data)
        except OSError as error:
            self._stop(error)
            return self._keep(data, step)
        return True

    def close(self) -> None:
        """Try a last time to write what is kept."""
        if self._why and not self._go_on():
            log.warning("nanproof: %s is incomplete: %s. %d records are missing", self._path, self._why, self._missing)
        handle, self._handle = self._handle, -1
        try:
            if handle >= 0:
                os.close(handle)
        except OSError as error:  # a network disk may find out only now that it is full
            log.warning("nanproof: %s is incomplete: %s", self._path, error.strerror)

    @property
    def _missing(self) -> int:
        return len(self._kept) + (self._lost[2] if self._lost else 0)

    def _opened(self) -> int:
        cut_broken_line(self._path)
        return open_append(self._path)

    def _write(self, data: bytes) -> None:
        if self._handle < 0:
            self._handle = self._opened()
        while data:  # a disk that fills up takes a part first, and gives its reason with the next call
            data = data[os.write(self._handle, data) :]

    def _keep(self, data: bytes, step: int | None) -> bool:
        if step is None or (not self._lost and self._size + len(data) <= self.KEPT):
            self._kept.append(data)
            self._size += len(data)
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
            log.warning("nanproof: %s cannot be written: %s. %s", self._path, error.strerror, what)
        self._why = error.strerror or type(error).__name__
        self._again = time.monotonic() + self.PAUSE
        handle, self._handle = self._handle, -1
        with suppress(OSError):
            if handle >= 0:
                os.close(handle)
            cut_broken_line(self._path)

    def _go_on(self) -> bool:
        """Write what was kept, and the line about what was lost."""
        count = self._missing
        try:
            while self._kept:
                self._write(self._kept[0])
                self._size -= len(self._kept.popleft())
            if self._lost:
                first, last, lines = self._lost
                gap = {"kind": "gap", "first": first, "last": last, "lines": lines, "time": _now(), "why": self._why}
                self._write(line({"v": VERSION, **gap}).encode())
        except OSError as error:
            self._stop(error)
            return False
        if self._told:
            lost = self._lost[2] if self._lost else 0
            log.warning("nanproof: %s is written again: %d records were late, %d are missing", self._path, count - lost, lost)
        self._lost, self._why = None, ""
        return True


def _facts(about: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A model of which not everything can be told (no sizes yet, say) is trained all the same."""
    try:
        return about()
    except Exception:
        log.debug("nanproof: the journal begins without facts", exc_info=True)
        return {}


def _now() -> float:
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
