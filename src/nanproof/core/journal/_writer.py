"""Writer: write a run's files in a separate thread, in batches, so that it rarely takes the interpreter away from training."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import ClassVar, TypeVar

from nanproof._records import NOT_A_RECORD, VERSION, Forecast, Incident, StepRecord, line, read_incidents
from nanproof.core.journal._lines import LineFile, now
from nanproof.core.journal._norms import NormFile
from nanproof.core.journal._steps import StepFile

log = logging.getLogger("nanproof")

WHOLE = 1_000_000
"""Bytes that a run's steps and norms take together, until its lines alone take three quarters of it; then norms take a third of
what the lines take."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Steps that never came to the writer."""

    first: int
    last: int
    count: int


File = TypeVar("File", LineFile, StepFile, NormFile)
Job = StepRecord | tuple[Incident | Forecast, float] | Lost | threading.Event | str | None
"""What the writer does: write a record, report lost steps, set an event, write a line as it is, or end (None)."""


class Writer:
    """Opens a run's files at once, and writes to them in `run`."""

    PAUSE: ClassVar[float] = 0.2
    """Seconds that it waits for more to write, unless there is something urgent."""

    def __init__(self, folder: Path) -> None:
        self.jobs: SimpleQueue[Job] = SimpleQueue()
        self.urgent = threading.Event()
        self._folder = folder
        self._marks: set[int] | None = None
        self._failed = False
        self._files: list[LineFile | StepFile | NormFile] = []
        try:
            self._incidents = self._opened(LineFile(folder / "incidents.jsonl"))
            self._steps = self._opened(StepFile(folder, self._incident_steps))
            self._norms = self._opened(NormFile(folder, self._budget, self._incident_steps))
        except BaseException:
            self.close()
            raise
        self._forecasts: LineFile | None = None

    def run(self) -> None:
        """Write until there is nothing more to come."""
        while True:
            jobs = [self.jobs.get()]
            if jobs[0] is not None:
                self.urgent.wait(self.PAUSE)
            self.urgent.clear()
            with suppress(Empty):
                while True:
                    jobs.append(self.jobs.get_nowait())
            self.work(jobs)
            if None in jobs:
                self.close()
                return

    def work(self, jobs: Sequence[Job]) -> None:
        """Do the jobs in order. Consecutive steps are written together."""
        steps: list[StepRecord] = []
        for job in jobs:
            if isinstance(job, StepRecord):
                steps.append(job)
                continue
            self._safely(self._write_steps, steps)
            steps = []
            self._safely(self._do, job)
        self._safely(self._write_steps, steps)
        self._safely(self._steps.rotate)

    def close(self) -> None:
        """Write what is kept, and close the files."""
        for file in self._files:
            self._safely(file.close)
        self._files = []

    def _opened(self, file: File) -> File:
        self._files.append(file)
        return file

    def _safely(self, act: Callable[..., object], *given: object) -> None:
        """Call a function. Log an exception once, and go on with the rest."""
        try:
            act(*given)
        except Exception:
            level = logging.DEBUG if self._failed else logging.WARNING
            log.log(level, "nanproof: %s: not all is written", self._folder, exc_info=True)
            self._failed = True

    def _write_steps(self, records: list[StepRecord]) -> None:
        if records:
            self._norms.add(records)  # first: whoever reads a line finds its norms
            self._steps.lines.add_all([(record.to_line().encode(), record.step) for record in records])

    def _do(self, job: Job) -> None:
        if isinstance(job, threading.Event):
            job.set()
        elif isinstance(job, str):
            self._steps.lines.add(job)
        elif isinstance(job, Lost):
            self._steps.lines.lose(job.first, job.last, job.count)
        elif isinstance(job, tuple):
            event, time = job
            file = self._incidents if isinstance(event, Incident) else self._forecast_file()
            file.add(line({**event.to_json(), "time": time}), event.step)
            if isinstance(event, Incident):
                self._norms.mark()
                if self._marks is not None:
                    self._marks.add(event.step)

    def _forecast_file(self) -> LineFile:
        """The file is made with the first of them: most runs have none."""
        if self._forecasts is None:
            self._forecasts = self._opened(LineFile(self._folder / "forecasts.jsonl", later=True))
        return self._forecasts

    def _budget(self) -> int:
        lines = self._steps.total
        return max(WHOLE - lines, lines // 3)

    def _incident_steps(self) -> set[int]:
        """The steps of all incidents, those of earlier runs in this folder too."""
        if self._marks is None:
            self._marks = set()
            with suppress(OSError, *NOT_A_RECORD):
                self._marks.update(incident.step for incident in read_incidents(self._folder))
        return self._marks


def opened(about: dict[str, object]) -> str:
    """Return the line that begins a run."""
    return line({"v": VERSION, "kind": "opened", "time": now(), "about": about})


def closed() -> str:
    """Return the line that ends a run."""
    return line({"v": VERSION, "kind": "closed", "time": now()})
