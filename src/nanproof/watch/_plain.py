"""Watching without a screen: lines for a log, the state once, or JSON for a program."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from nanproof.watch._plot import Marks
from nanproof.watch._runs import Entry, View, Watched
from nanproof.watch._table import runs_table
from nanproof.watch._words import full_status, said, summary, title, told_optimizer, told_terms

Kind = TypeVar("Kind")
_SHOWN = 20
"""Incidents that were there before watching began, and are told all the same."""


def caught_up(watched: Watched) -> None:
    """Look until all that is written has been read."""
    watched.look()
    while watched.behind:
        watched.look()


def now(watched: Watched, columns: int, marks: Marks) -> Iterator[str]:
    """The state of every run, and the newest incidents of each."""
    views = list(watched.views.values())
    heading, items = runs_table(views, columns, marks)
    yield "".join(text for text, _ in heading).rstrip()
    for item in items:
        yield "".join(text for text, _ in item.lines[0]).rstrip()
    for view in views:
        for optimizer in view.optimizers:
            yield said(f"{_named(view, len(views) > 1)}{told_optimizer(optimizer)}", marks.ascii)
        if view.terms:
            yield said(f"{_named(view, len(views) > 1)}terms of the loss: {', '.join(told_terms(view.terms))}", marks.ascii)
        for entry in view.groups()[:5]:
            yield said(f"{_named(view, len(views) > 1)}{told(entry)}", marks.ascii)
    for path in watched.waiting:
        yield said(f"{path}: there is no run in it", marks.ascii)


def as_json(watched: Watched) -> Iterator[str]:
    """One object a run."""
    for view in watched.views.values():
        yield json.dumps(view.to_json(), allow_nan=False, default=str)


def told(entry: Entry) -> str:
    """An incident or a forecast on one line, with cause and fix if they are known."""
    return said(f"{title(entry)}. {summary(entry)}")


def _named(view: View, several: bool) -> str:
    return f"{said(view.name)}: " if several else ""


def _newest(items: tuple[Kind, ...], number: int) -> tuple[Kind, ...]:
    return items[max(len(items) - number, 0) :]


class Lines:
    """Every incident and forecast once, as they come, and a line on where it stands now and then, until all runs have ended."""

    def __init__(self, watched: Watched, put: Callable[[str], None], marks: Marks, *, every: float = 30.0) -> None:
        self._watched, self._put, self._marks, self._every = watched, put, marks, every
        self._told: dict[Path, tuple[int, int]] = {}
        self._states: dict[Path, str] = {}
        self._waiting: tuple[Path, ...] = ()

    def run(self, sleep: Callable[[float], None] = time.sleep, clock: Callable[[], float] = time.monotonic) -> None:
        due = clock() + self._every
        while not self.round():
            sleep(0.0 if self._watched.behind else 1.0)
            if clock() >= due:
                due = clock() + self._every
                for view in self._watched.views.values():
                    if not view.done:
                        self._status(view)

    def round(self) -> bool:
        """Tell what is new; True when nothing more will come."""
        self._watched.look()
        if self._watched.waiting != self._waiting:
            self._waiting = self._watched.waiting
            for path in self._waiting:
                self._say(f"waiting for {path}: there is no run in it yet")
        views = list(self._watched.views.values())
        for view in views:
            if not view.catching_up:
                self._events(view)
            if view.state != self._states.get(view.folder) and not view.catching_up:
                self._states[view.folder] = view.state
                self._status(view)
        return bool(views) and not self._waiting and all(view.done for view in views)

    def _events(self, view: View) -> None:
        """Oldest first. A folder that was written anew begins again."""
        first = view.folder not in self._told
        incidents, forecasts = self._told.get(view.folder, (0, 0))
        if view.total_incidents < incidents or view.total_forecasts < forecasts:
            incidents = forecasts = 0
        new = view.total_incidents - incidents + view.total_forecasts - forecasts
        fresh = replace(
            view,
            incidents=_newest(view.incidents, view.total_incidents - incidents),
            forecasts=_newest(view.forecasts, view.total_forecasts - forecasts),
        ).entries()[: _SHOWN if first else None]
        self._told[view.folder] = view.total_incidents, view.total_forecasts
        if new > len(fresh):
            self._say(f"{_named(view, self._several)}{new - len(fresh)} earlier ones are not shown")
        for entry in reversed(fresh):
            self._say(f"{_named(view, self._several)}{told(entry)}")

    @property
    def _several(self) -> bool:
        return len(self._watched.views) > 1

    def _status(self, view: View) -> None:
        self._say(f"{said(view.name)}: {', '.join(full_status(view))}")

    def _say(self, text: str) -> None:
        self._put(said(text, self._marks.ascii))
