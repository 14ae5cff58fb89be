"""Session: one run of a script under `nanproof run`. What it has come to so far, and when to keep hands off: in another process,
in a trainer that has an adapter of its own, inside nanproof's own steps."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import repeat
from operator import is_
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nanproof._errors import NanproofError
from nanproof._policy import Policy
from nanproof._text import shown

if TYPE_CHECKING:
    from nanproof.integrations.script._runs import ScriptRuns
    from nanproof.integrations.script._script_run import Tally


@dataclass(frozen=True, slots=True)
class Options:
    """What the user asked for."""

    policy: Policy
    run_dir: Path | None = None
    optimizer: Literal["auto", "own", "fused"] = "auto"
    """Which form of an optimizer that left it open is used: its own, fused, or own on CPU and fused elsewhere."""
    quiet: bool = False
    observe: bool = False
    """Whether activations, weights and attention are looked at too."""


def covers(optimizers: Iterable[Any], optimizer: Any) -> bool:
    return any(map(is_, optimizers, repeat(optimizer)))


class Inside:
    """While a guard works by itself, outside of any step of the script: the steps it takes again are the optimizers' own."""

    def __init__(self, optimizers: Iterable[Any]) -> None:
        self._optimizers = list(optimizers)

    def covers(self, optimizer: Any) -> bool:
        return covers(self._optimizers, optimizer)

    def really(self, step: Callable[..., Any], optimizer: Any) -> Any:
        return step(optimizer)


class Session:
    """One run of one script."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.tallies: list[Tally] = []
        """Of every run that was guarded, or left alone, in the order they appeared."""
        self.trainers: list[tuple[str, Any]] = []
        """(name, guard) of every trainer that was protected."""
        self.taking: Any = None
        """The step that is being taken."""
        self.runs: ScriptRuns | None = None
        """The script's optimizers, once it has imported torch."""
        self.seen = False
        """An optimizer was made, or a trainer begun."""
        self.compiles = False
        """Whether the script has called torch.compile."""
        self._open = True
        self._away = 0
        self._process = os.getpid()
        self._said: set[str] = set()
        self.rank = int(os.environ.get("RANK", "0"))

    @property
    def guarding(self) -> bool:
        """Not in a worker process, not while a trainer with an adapter runs, not inside nanproof's own steps."""
        return self._open and not self._away and self.taking is None and os.getpid() == self._process

    @property
    def mine(self) -> bool:
        """This is the process that the script was started in."""
        return os.getpid() == self._process

    @contextmanager
    def away(self) -> Iterator[None]:
        """While somebody else guards."""
        self._away += 1
        try:
            yield
        finally:
            self._away -= 1

    @contextmanager
    def inside(self, optimizers: Iterable[Any]) -> Iterator[None]:
        """While the guard of these optimizers works by itself."""
        before, self.taking = self.taking, Inside(optimizers)
        try:
            yield
        finally:
            self.taking = before

    def enter_backward(self) -> None:
        """Inside one there may be others, of recomputed activations: they are parts of it."""
        self._away += 1

    def leave_backward(self) -> None:
        self._away -= 1

    def close(self, error: BaseException | None) -> None:
        """The script has ended."""
        runs = [] if self.runs is None else self.runs.every()
        if self.runs is not None and isinstance(error, Exception) and not isinstance(error, NanproofError):
            try:
                self.runs.raised(error)
            except Exception as failure:
                self.say(f"the exception could not be looked at: {failure!r}")
            runs = self.runs.every()
        for name, close in [(run.tally.name, run.close) for run in runs] + [(name, guard.leave) for name, guard in self.trainers]:
            try:
                close(error)
            except Exception as failure:
                self.say(f"while closing the guard of {name}: {failure!r}")
        if self.runs is not None:
            self.runs.write_index()  # members may have changed since
            self.runs.first_calls.stop()
        self._open = False

    def say(self, text: str) -> None:
        if self.rank == 0 and not self.options.quiet:
            print(f"nanproof: {shown(text)}", file=sys.stderr, flush=True)

    def say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)
