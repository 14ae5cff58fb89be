"""Session: what is known of a script while it runs under `nanproof run`. Which optimizers it has, which of them are guarded, and
when to keep hands off: in another process, in a trainer that has an adapter of its own, inside nanproof's own steps."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from nanproof._policy import Policy

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from nanproof.integrations.script._script_run import ScriptRun, Tally


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


_RECENT = 64
"""Backwards after which an optimizer that none of them reached counts as dormant."""


def _of(optimizer: Any) -> ScriptRun:
    watched: ScriptRun = optimizer._nanproof_watched
    return watched


class Inside:
    """While a guard works by itself, outside of any step of the script: the steps it takes again are the optimizer's own."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def really(self, step: Callable[..., Any], optimizer: Any) -> Any:
        return step(optimizer)


class Session:
    """One run of one script."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.tallies: list[Tally] = []
        """Of every optimizer that was guarded, or left alone, in the order they appeared."""
        self.trainers: list[tuple[str, Any]] = []
        """(name, guard) of every trainer that was protected."""
        self.taking: Any = None
        """The step that is being taken."""
        self._all: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.backwards = 0
        """So far."""
        self.last_loss: Any = None
        """Of a backward at which nothing was guarded yet."""
        self.seen = False
        """An optimizer was made, or a trainer begun."""
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
    def inside(self, optimizer: Any) -> Iterator[None]:
        """While the guard of this optimizer works by itself."""
        before, self.taking = self.taking, Inside(optimizer)
        try:
            yield
        finally:
            self.taking = before

    def see(self, optimizer: Optimizer) -> None:
        """An optimizer was made."""
        if self.guarding and optimizer not in self._all:
            from nanproof.integrations.script._script_run import ScriptRun

            # On the optimizer itself, and it alone, so that both go when the script lets go of it.
            optimizer._nanproof_watched = ScriptRun(optimizer, self.say_once, self.inside)  # type: ignore[attr-defined]
            self._all.add(optimizer)
            self.seen = True

    def watched(self, optimizer: Optimizer) -> ScriptRun | None:
        """None where the step is none of nanproof's business."""
        if not self.guarding:
            return None
        self.see(optimizer)
        watched = _of(optimizer)
        return None if watched.left_alone else watched

    def _every(self) -> list[ScriptRun]:
        return sorted((_of(optimizer) for optimizer in self._all), key=lambda watched: watched.number)

    def start(self, watched: ScriptRun, at_step: bool = False) -> None:
        """Guard it from now on, if it can be."""
        if watched.guard is not None or watched.left_alone:
            return
        count = sum(tally.guarded for tally in self.tallies)
        run_dir = self.options.run_dir
        if run_dir is not None and count:
            run_dir = run_dir / f"optimizer-{count + 1}"
        try:
            watched.start(
                self.options.policy, run_dir, self.options.optimizer, self.last_loss if at_step else None, self.options.observe
            )
        except Exception as error:
            watched.leave_alone(f"{type(error).__name__}: {error}")
        watched.reached = self.backwards
        if watched.guard is not None or watched.left_alone:
            self.tallies.append(watched.tally)

    def at_backward(self) -> list[ScriptRun]:
        """Everything that is guarded, from now on with what has appeared since."""
        if not self.guarding:
            return []
        for watched in self._every():
            self.start(watched)
        return self.guarded()

    def sorted_out(self, watching: list[ScriptRun]) -> tuple[list[ScriptRun], list[ScriptRun]]:
        """A backward begins: those that it may concern, and those that none has reached for long, such as the optimizer of a
        model that is trained already."""
        self.backwards += 1
        active = [w for w in watching if self.backwards - w.reached <= _RECENT] or watching
        return active, [w for w in watching if w not in active]

    @contextmanager
    def in_backward(self) -> Iterator[None]:
        """Inside one there may be others, of recomputed activations: they are parts of it."""
        with self.away():
            yield

    def guarded(self) -> list[ScriptRun]:
        return [w for w in self._every() if w.guard is not None and not w.left_alone] if self.guarding else []

    def close(self, error: BaseException | None) -> None:
        """The script has ended."""
        for watched in self._every():
            try:
                watched.close(error)
            except Exception as failure:
                self.say(f"while closing the guard of {watched.tally.name}: {failure!r}")
        for name, guard in self.trainers:
            try:
                guard.leave(error)
            except Exception as failure:
                self.say(f"while closing the guard of {name}: {failure!r}")
        self._open = False

    def say(self, text: str) -> None:
        if self.rank == 0 and not self.options.quiet:
            print(f"nanproof: {text}", file=sys.stderr, flush=True)

    def say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.say(text)
