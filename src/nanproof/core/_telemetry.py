"""The way of records to the host, and from there to the disk.

`Courier` carries a step's vector from the device through pinned memory; reading it later waits only if the device is more
than the lag behind, in which case it still has that many steps of work queued. `Journal` hands records to the thread that writes
them.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from nanproof._access import check_own
from nanproof._records import Forecast, Incident, StepRecord
from nanproof.core.journal._lines import now
from nanproof.core.journal._writer import Lost, Writer, closed, opened
from nanproof.core.support._files import FolderLock, not_writable
from nanproof.files._parts import STEPS

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
        return torch.empty(vector.shape, dtype=vector.dtype, device="cpu", pin_memory=True), torch.cuda.Event()


class Journal:
    """`steps.jsonl`, `norms.bin`, `incidents.jsonl` and `forecasts.jsonl` in a run's folder; does nothing without one.

    The training thread only puts records into a queue, which costs the same for any number of parameters. The thread of a
    `Writer` writes ordinary steps within a second and incidents at once. A process that ends writes the rest. A full disk never
    stops the run: see `LineFile`.
    """

    MOST: ClassVar[int] = 2000
    """Steps that wait to be written; fewer where they are large. Beyond them steps are lost, and a line says which."""
    MEMORY: ClassVar[int] = 64 << 20
    """Bytes of them, about."""
    PATIENCE: ClassVar[float] = 0.05
    """Seconds that training waits once for the writer, before steps are lost."""

    def __init__(self, folder: str | Path | None, about: Callable[[], dict[str, Any]] = dict) -> None:
        self._writer: Writer | None = None
        self._thread: threading.Thread | None = None
        self._finalizer: weakref.finalize[Any, Journal] | None = None
        self._lock: FolderLock | None = None
        self._lost: Lost | None = None
        self._process = os.getpid()
        if folder is None:
            return
        place, what = Path(folder), f"Guard(run_dir={str(folder)!r})"
        try:
            if (place.parent / STEPS).exists():
                check_own(place)  # a link inside a run's folder; elsewhere a link to a folder is the user's choice
            place.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(place, what)
            check_own(place / "forecasts.jsonl")
            writer = Writer(place)
        except OSError as error:
            if self._lock is not None:
                self._lock.release()
            raise not_writable(what, error) from error
        writer.work([opened(_facts(about))])
        self._writer = writer

    def step(self, record: StepRecord) -> None:
        """Hand over a step. Costs the same for any number of parameters."""
        writer = self._open_writer()
        if writer is None:
            return
        most = min(self.MOST, self.MEMORY // (8 * len(record.norms) + 1000))
        waiting = writer.jobs.qsize()
        if waiting > most and not self._room(writer, most):
            lost = self._lost or Lost(record.step, record.step, 0)
            self._lost = Lost(lost.first, record.step, lost.count + 1)
            return
        if self._lost is not None:
            writer.jobs.put(self._lost)
            self._lost = None
        writer.jobs.put(record)
        if waiting > most // 2:
            writer.urgent.set()

    def incident(self, incident: Incident) -> None:
        """Hand over an incident, which is written at once."""
        self._tell(incident)

    def forecast(self, forecast: Forecast) -> None:
        """Hand over a forecast, which is written at once."""
        self._tell(forecast)

    def flush(self) -> None:
        """Wait until all that was handed over is written, or kept for when the disk has room."""
        writer = self._open_writer()
        if writer is not None:
            done = threading.Event()
            writer.jobs.put(done)
            writer.urgent.set()
            done.wait()

    def close(self) -> None:
        """Write the rest and close the files."""
        writer = self._open_writer()
        if writer is not None:
            if self._lost is not None:
                writer.jobs.put(self._lost)
            writer.jobs.put(closed())
            self._writer = None
            assert self._thread is not None and self._finalizer is not None
            _finish(writer, self._thread, self._process)  # if Ctrl-C interrupts it, the finalizer does it
            self._finalizer.detach()
        if self._lock is not None and os.getpid() == self._process:
            self._lock.release()

    def _tell(self, event: Incident | Forecast) -> None:
        writer = self._open_writer()
        if writer is not None:
            writer.jobs.put((event, now()))
            writer.urgent.set()

    def _open_writer(self) -> Writer | None:
        """Return the writer, with its thread running; None if there is none, as in a forked process."""
        writer = self._writer
        if writer is None or os.getpid() != self._process:
            return None
        if self._thread is None:
            self._thread = threading.Thread(target=writer.run, name="nanproof-journal", daemon=True)
            self._thread.start()
            self._finalizer = weakref.finalize(self, _finish, writer, self._thread, self._process)
        return writer

    def _room(self, writer: Writer, most: int) -> bool:
        """Give the writer a moment, once until there is room again."""
        writer.urgent.set()
        until = time.monotonic() + (self.PATIENCE if self._lost is None else 0.0)
        while writer.jobs.qsize() > most:
            if time.monotonic() >= until:
                return False
            time.sleep(0.001)
        return True


def _finish(writer: Writer, thread: threading.Thread, process: int) -> None:
    """Let the writer write what is left, and end it."""
    if os.getpid() != process:
        return  # a forked process has no such thread
    writer.jobs.put(None)
    if thread is not threading.current_thread():  # where the collector may come while that thread holds the event's lock
        writer.urgent.set()
        thread.join()


def _facts(about: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A model of which not everything can be told (no sizes yet, say) is trained all the same."""
    try:
        return about()
    except Exception:
        log.debug("nanproof: the journal begins without facts", exc_info=True)
        return {}
