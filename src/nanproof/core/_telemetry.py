"""The way of records to the host, and from there to the disk.

`Courier` carries a step's vector from the device through pinned memory; reading it later waits only if the device is more
than the lag behind, in which case it still has that many steps of work queued. `Journal` appends lines of JSON.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from nanproof._errors import UsageError
from nanproof._records import VERSION, Forecast, Incident, StepRecord, line
from nanproof.core.support._files import FolderLock

log = logging.getLogger("nanproof")


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

    `steps.jsonl` says when the run was opened, on what, and when it was closed. A disk that fills up while training stops the
    journal with a warning, never the run.
    """

    def __init__(self, folder: str | Path | None, about: Callable[[], dict[str, Any]] = dict) -> None:
        self._files: dict[str, TextIO] = {}
        self._header: tuple[Any, ...] = ()
        self._lock: FolderLock | None = None
        if folder is None:
            return
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self.folder, f"Guard(run_dir={str(folder)!r})")
            for name in ("steps", "incidents"):
                self._open(name)
        except OSError as error:
            self._close_files()
            raise UsageError(
                f"Guard(run_dir={str(folder)!r}) cannot be written: {error.strerror}. Choose one that can be written"
            ) from error
        self._write("steps", line({"v": VERSION, "kind": "opened", "time": _now(), "about": _facts(about)}))

    def _open(self, name: str) -> None:
        path = self.folder / f"{name}.jsonl"
        cut_broken_line(path)
        self._files[name] = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115

    def step(self, record: StepRecord) -> None:
        if "steps" not in self._files:
            return
        sites = () if record.observed is None else record.observed.sites
        if not self._header or record.names is not self._header[0] or sites is not self._header[1]:
            self._header = record.names, sites
            header = {"v": VERSION, "kind": "header", "names": list(record.names)}
            self._write("steps", line({**header, "sites": list(sites)} if sites else header))
        self._write("steps", record.to_line())

    def incident(self, incident: Incident) -> None:
        self._write("incidents", line({**incident.to_json(), "time": _now()}))

    def forecast(self, forecast: Forecast) -> None:
        """The file is made with the first of them: most runs have none."""
        if "incidents" in self._files and "forecasts" not in self._files:
            with suppress(OSError):
                self._open("forecasts")
        self._write("forecasts", line({**forecast.to_json(), "time": _now()}))

    def close(self) -> None:
        if "steps" in self._files:
            self._write("steps", line({"v": VERSION, "kind": "closed", "time": _now()}))
        self._close_files()

    def _close_files(self) -> None:
        if self._lock is not None:
            self._lock.release()
        for name in list(self._files):
            try:
                self._files.pop(name).close()
            except OSError as error:
                log.warning("nanproof: %s.jsonl is incomplete: %s", name, error.strerror)

    def _write(self, name: str, text: str) -> None:
        file = self._files.get(name)
        if file is None:
            return
        try:
            file.write(text)
        except OSError as error:
            del self._files[name]
            with suppress(OSError):
                file.close()
            log.warning("nanproof: no more lines go to %s.jsonl: %s. Training goes on", name, error.strerror)


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
    """A run killed while writing leaves half a line; what follows it would be unreadable. A file that ends well is not touched:
    another process may have appended to it since it was looked at."""
    if not path.is_file() or path.stat().st_size == 0:
        return
    with open(path, "rb+") as file:
        size = end = file.seek(0, 2)
        while end > 0:
            start = max(0, end - 65536)
            file.seek(start)
            newline = file.read(end - start).rfind(b"\n")
            if newline >= 0:
                if start + newline + 1 < size:
                    file.truncate(start + newline + 1)
                return
            end = start
        file.truncate(0)
