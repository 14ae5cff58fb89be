"""The runs that are watched: found, read on, and handed out as `View`s that never change, so that one thread can read files while
another draws."""

from __future__ import annotations

import heapq
import itertools
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from nanproof._records import Forecast, Incident, encode
from nanproof.files._parts import STEPS
from nanproof.report.folder._run import Run, runs_in
from nanproof.report.folder._series import METRICS, Bucket
from nanproof.report.folder._troubles import troubles
from nanproof.report.page._contents import optimizers
from nanproof.report.page._terms import bad_first
from nanproof.watch._plot import Series

Event = Incident | Forecast
KEPT = 300
"""Incidents, forecasts and turns that a view holds; the newest."""
MOST = 200
"""Runs that are watched in one folder; the newest."""
DONE = ("halted", "ended", "stopped", "unknown")
"""States in which nothing is written any more."""
_PORTION, _BUDGET = 4 << 20, 0.4
"""Bytes that are read at a time, and seconds after which a long file has to wait for the next look."""
_FAR = 2.0**53
"""No step is that far: such a number is no step, and could not be drawn."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An incident or a forecast as a list shows it."""

    event: Event
    origin: Incident | None = None
    """The earlier incident that it is like, as its `same_as` says."""
    again: tuple[int, ...] = ()
    """Steps of the later incidents like it, which have no entry of their own."""
    optimizer: str = ""
    """The optimizer that it is about, where the run has several."""

    @property
    def newest(self) -> int:
        """The step of the newest incident that it stands for."""
        return self.again[-1] if self.again else step_of(self.event)


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """A run as it was when it was last looked at."""

    folder: Path
    name: str
    state: str = "waiting"
    """As of `Run.state`, and "waiting" for a folder that is not there yet."""
    catching_up: bool = False
    """There is more in the files than was read so far."""
    step: int | None = None
    loss: float | None = None
    grad_norm: float | None = None
    lr: float | None = None
    scale: float | None = None
    terms: tuple[tuple[str, float], ...] = ()
    """Of the loss, at the newest step; those that are not finite first."""
    rate: float | None = None
    seconds: float = 0.0
    written: float | None = None
    """When a step was written last, in seconds since 1970."""
    counts: Mapping[str, int] = field(default_factory=dict)
    incidents: tuple[Entry, ...] = ()
    """Each alone, in the order they were written in."""
    grouped: tuple[Entry, ...] = ()
    """All incidents of the run, those that are alike in one entry; ordered by the newest of each, and the newest of these."""
    total_incidents: int = 0
    forecasts: tuple[Entry, ...] = ()
    total_forecasts: int = 0
    turns: tuple[tuple[int, int], ...] = ()
    gaps: tuple[tuple[int, int, str], ...] = ()
    """First and last step that are not in the records, and why."""
    about: Mapping[str, Any] = field(default_factory=dict)
    series: Mapping[str, Series] = field(default_factory=dict)
    """By metric. The loss is always there; the others are of the run that is looked at closely."""
    optimizers: tuple[Mapping[str, Any], ...] = ()
    """Each optimizer of a run that has several. Counts, incidents and state are those of all."""
    drawn: str = ""
    """The one of them that step, loss and curves belong to."""

    @property
    def refused(self) -> int:
        return self.counts.get("skipped", 0)

    def still(self) -> float | None:
        """For how many seconds a run under way has not taken a step, where that is far more than usual."""
        if self.state != "running" or self.catching_up or self.written is None:
            return None
        quiet = time.time() - self.written
        return quiet if quiet > max(60.0, 30.0 / self.rate if self.rate else 60.0) else None

    @property
    def done(self) -> bool:
        """Nothing more will come."""
        return self.state in DONE and not self.catching_up

    @property
    def last_step(self) -> int:
        """The end of what can be drawn."""
        loss = self.series.get("loss")
        return max(loss.steps[-1] + 1 if loss and loss.steps else 0, (self.step or 0) + 1)

    def entries(self) -> list[Entry]:
        """Each incident and forecast alone, newest first. Each kind stays in the order it was written in: a run may go back."""
        return self._merged(list(self.incidents))

    def groups(self) -> list[Entry]:
        """The same, with incidents that are alike in one entry."""
        return self._merged(list(self.grouped))

    def _merged(self, incidents: list[Entry]) -> list[Entry]:
        both = (incidents[::-1], self.forecasts[::-1])
        return list(heapq.merge(*both, key=lambda entry: -entry.newest))

    def to_json(self) -> dict[str, Any]:
        """What a program wants to know."""
        return {
            "v": 1,
            "run": str(self.folder),
            "state": self.state,
            "step": self.step,
            "loss": encode(self.loss),
            "grad_norm": encode(self.grad_norm),
            "lr": encode(self.lr),
            "scale": encode(self.scale),
            "terms": {name: encode(x) for name, x in self.terms},
            "rate": encode(self.rate),
            "seconds": encode(self.seconds),
            "counts": {**self.counts, "incidents": self.total_incidents, "forecasts": self.total_forecasts},
            "optimizers": [dict(optimizer) for optimizer in self.optimizers],
            "incidents": [_entry_json(entry) for entry in self.incidents],
            "forecasts": [_entry_json(entry) for entry in self.forecasts],
        }


def _entry_json(entry: Entry) -> dict[str, Any]:
    data = entry.event.to_json()
    return {**data, "optimizer": entry.optimizer} if entry.optimizer else data


def step_of(event: Event) -> int:
    """Its step; 0 if the file says nonsense."""
    return event.step if isinstance(event.step, int) and abs(event.step) < _FAR else 0


class Watched:
    """Folders of runs, and folders in which runs are or will be."""

    def __init__(self, paths: Sequence[str | Path], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.paths = [Path(path) for path in paths]
        self.views: dict[Path, View] = {}
        """By folder, in the order in which they are shown. Replaced, never changed: another thread may read it."""
        self.waiting: tuple[Path, ...] = tuple(self.paths)
        """Of the paths, those in which there is no run yet."""
        self.close: Path | None = None
        """The run that is looked at closely."""
        self.drawn = 0
        """Which of its optimizers is drawn; counted on beyond the last, it is the first again."""
        self.behind = False
        """The last look ran out of time: look again at once."""
        self._clock = clock
        self._runs: dict[Path, Run] = {}
        self._roots: dict[Path, Path] = {}
        self._search_at = 0.0
        self._rest_until: dict[Path, float] = {}

    def run(self, folder: Path) -> Run:
        """Of a view's folder. Not while another thread looks."""
        return self._runs[folder]

    def look(self) -> bool:
        """Find runs, read on, make new views; True if anything changed. Costs little where nothing was written."""
        now = self._clock()
        changed = now >= self._search_at and self._search(now)
        close = self.close if self.close in self._runs else next(iter(self._runs), None)
        self.behind = False
        views = dict(self.views)
        for folder, run in self._runs.items():
            if folder != close and now < self._rest_until.get(folder, 0.0):
                continue
            view = self._view(folder, run, folder == close)
            if view is not views.get(folder):
                views[folder], changed = view, True
            self.behind = self.behind or view.catching_up
            self._rest_until[folder] = now + (5.0 if view.done else 0.0)
        self.views = {folder: views[folder] for folder in self._runs}
        return changed

    def _search(self, now: float) -> bool:
        """New runs come first. Takes at most a twentieth of the time: folders can be large, and disks slow."""
        known = len(self._runs)
        waiting = []
        for path in self.paths:
            found: list[Path] = []
            with suppress(OSError):
                found = runs_in(path)[:MOST] if path not in self._runs else [path]
            if not found and not any(root == path for root in self._roots.values()):
                waiting.append(path)
            fresh = {folder: Run(folder) for folder in found if folder not in self._runs}
            self._roots.update(dict.fromkeys(fresh, path))
            self._runs = {**fresh, **self._runs} if known else {**self._runs, **fresh}
        before, self.waiting = self.waiting, tuple(waiting)
        self._search_at = now + max(1.0 if waiting else 2.0, 20 * (self._clock() - now))
        return len(self._runs) != known or before != self.waiting

    def _view(self, folder: Path, run: Run, close: bool) -> View:
        """The old view if it is still true."""
        started = self._clock()
        before = self.views.get(folder)
        new = more = run.poll(_PORTION)
        while more and self._clock() - started < _BUDGET:
            more = run.poll(_PORTION)
        state = run.state
        wanted = METRICS if close else METRICS[:1]
        name = self._name(folder)
        part = run.parts[self.drawn % len(run.parts) if close else 0]
        now = (state, name, False, part.optimizer)
        same = before is not None and (before.state, before.name, before.catching_up, before.drawn) == now
        if before is not None and same and not new and all(metric in before.series for metric in wanted):
            return before
        last, total = part.newest, run.total
        incidents, grouped = _entries(run)
        coming = [[(each.written(one), Entry(one, optimizer=each.optimizer)) for one in each.forecasts] for each in run.parts]
        forecasts = tuple(entry for _, entry in heapq.merge(*coming, key=itemgetter(0)))
        return View(
            folder=folder,
            name=name,
            state=state,
            catching_up=more,
            step=None if last is None else last.step,
            loss=None if last is None else last.loss,
            grad_norm=None if last is None else last.grad_norm,
            lr=None if last is None else last.lr,
            scale=None if last is None else last.scale,
            terms=() if last is None else tuple(bad_first(last.terms)),
            rate=part.rate if state == "running" else None,
            seconds=part.seconds,
            written=max((moment for each in run.parts if (moment := _written(each.folder)) is not None), default=None),
            counts=dict(sum((each.counts for each in run.parts), Counter())),
            incidents=incidents[-KEPT:],
            grouped=grouped[-KEPT:],
            total_incidents=total["incidents"],
            forecasts=forecasts[-KEPT:],
            total_forecasts=total["forecasts"],
            turns=tuple(part.turns[-KEPT:]),
            gaps=tuple(part.gaps),
            about=part.about,
            series=_series(part, wanted),
            optimizers=tuple(optimizers(run)),
            drawn=part.optimizer,
        )

    def _name(self, folder: Path) -> str:
        """As short as tells it from the others."""
        root = self._roots[folder]
        if folder != root:
            return os.path.relpath(folder, root) if len(self.paths) == 1 else str(folder)
        own = folder.name or folder.resolve().name or str(folder)
        return own if sum(other.name == folder.name for other in self._runs) == 1 else str(folder)


def _written(folder: Path) -> float | None:
    with suppress(OSError):
        return (folder / STEPS).stat().st_mtime
    return None


def _entries(run: Run) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """Return an entry for each incident, and one for each group of them, by its newest incident."""
    numbers = itertools.count(1)
    times = [[(part.written(one), next(numbers)) for one in part.incidents] for part in run.parts]
    place = {number: i for i, (_, number) in enumerate(heapq.merge(*times, key=itemgetter(0)))}
    alone: dict[int, Entry] = {}
    groups: dict[int, Entry] = {}
    for trouble in troubles(run):
        for number, incident in zip(trouble.numbers, trouble.incidents, strict=True):
            origin = None if incident is trouble.origin else trouble.origin
            alone[place[number]] = Entry(incident, origin, optimizer=trouble.part.optimizer)
        again = tuple(incident.step for incident in trouble.incidents[1:])
        groups[place[trouble.numbers[-1]]] = replace(alone[place[trouble.numbers[0]]], again=again)
    return tuple(alone[i] for i in sorted(alone)), tuple(groups[i] for i in sorted(groups))


def _series(run: Run, metrics: Sequence[str]) -> dict[str, Series]:
    buckets: list[Bucket] = [bucket for bucket in run.curves if abs(bucket.start) < _FAR]
    steps = [bucket.start for bucket in buckets]
    found = {}
    for place, metric in enumerate(METRICS):
        if metric in metrics:
            extents = [bucket.metrics[place] for bucket in buckets]
            nothing = float("nan")
            found[metric] = Series(
                steps,
                run.curves.width,
                [e.low if e.count else nothing for e in extents],
                [e.high if e.count else nothing for e in extents],
                [e.mean for e in extents],
                [e.bad for e in extents],
            )
    return found
