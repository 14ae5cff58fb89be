"""Progress of long work: bars on a terminal, a line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

EVERY = 10.0
"""Seconds between two lines if there is no terminal."""
Advance = Callable[[int, str], None]
"""Called with the parts done so far and a short text."""


class Progress:
    """Prints messages and progress on a console."""

    def __init__(self, console: Console | None = None) -> None:
        """Without a console it prints nothing."""
        self._console = console

    def say(self, line: str) -> None:
        if self._console is not None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def of(self, name: str, total: int) -> Iterator[Advance]:
        """Show the progress of work with `total` parts."""
        if self._console is not None and self._console.is_terminal:
            yield from self._bar(name, total)
        else:
            yield from self._lines(name, total)

    def _bar(self, name: str, total: int) -> Iterator[Advance]:
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as Bars

        columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        more = (TimeRemainingColumn(), TextColumn("{task.fields[said]}", markup=False))
        with Bars(*columns, *more, console=self._console) as bars:
            task = bars.add_task(name, total=total, said="")

            def advance(done: int, said: str = "") -> None:
                bars.update(task, completed=done, said=said)

            yield advance

    def _lines(self, name: str, total: int) -> Iterator[Advance]:
        begun = last = time.monotonic()

        def advance(done: int, said: str = "") -> None:
            nonlocal last
            now = time.monotonic()
            if done >= total or now - last >= EVERY:
                last = now
                self.say(f"{name}: {done}/{total} in {now - begun:.0f} s{', ' + said if said else ''}")

        yield advance
