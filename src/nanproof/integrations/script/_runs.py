"""ScriptRuns: the optimizers of a script, each in the run that guards it."""

from __future__ import annotations

import weakref
from typing import Any

from torch.optim import Optimizer

from nanproof.core.support._index import next_folder, write_index
from nanproof.integrations._groups import RECENT, Groups
from nanproof.integrations.script._script_run import ScriptRun
from nanproof.integrations.script._session import Session


class ScriptRuns(Groups[ScriptRun]):
    """Which runs there are, and what they have in common."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._all: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.last_loss: Any = None
        """Of the last backward."""

    def see(self, optimizer: Optimizer) -> None:
        """An optimizer was made."""
        if self._session.guarding and optimizer not in self._all:
            self._put(ScriptRun([optimizer], self._session), [optimizer])
            self._all.add(optimizer)
            self._session.seen = True

    def watched(self, optimizer: Optimizer) -> ScriptRun | None:
        """None where the step is none of nanproof's business."""
        if not self._session.guarding:
            return None
        self.see(optimizer)
        run = self.of(optimizer)
        return None if run.left_alone else run

    def of(self, optimizer: Any) -> ScriptRun:
        run: ScriptRun = optimizer._nanproof_watched
        return run

    def every(self) -> list[ScriptRun]:
        runs = {id(run): run for run in map(self.of, self._all)}
        return sorted(runs.values(), key=lambda run: run.number)

    def guarded(self) -> list[ScriptRun]:
        return [run for run in self.every() if run.guard is not None and not run.left_alone] if self._session.guarding else []

    def begin(self, group: ScriptRun, at_step: bool) -> None:
        session = self._session
        run_dir = session.options.run_dir
        if run_dir is not None:
            run_dir = next_folder(run_dir, (tally.run_dir for tally in session.tallies))
        try:
            group.start(run_dir, self.last_loss if at_step else None)
        except Exception as error:
            group.leave_alone(f"{type(error).__name__}: {error}")
        group.reached = group.fed = self.backwards
        session.tallies.append(group.tally)
        self.write_index()

    def write_index(self) -> None:
        """Write which optimizers the run's folder holds, as far as that is known now."""
        run_dir = self._session.options.run_dir
        if run_dir is not None and self._session.rank == 0:
            write_index(run_dir, [(tally.run_dir, tally.title) for tally in self._session.tallies if tally.run_dir is not None])

    def merge(self, group: ScriptRun, other: ScriptRun) -> None:
        if other.started:
            other.close(None)
            if not other.tally.steps:
                self._session.tallies.remove(other.tally)
            self.write_index()
        members = other.members
        group.add(members)
        group.changed = group.started
        self._put(group, members)

    def split(self, group: ScriptRun, members: list[Optimizer]) -> None:
        group.remove(members)
        group.changed = True
        group.follow(self.last_loss)
        self._put(ScriptRun(members, self._session, known=True), members)

    @staticmethod
    def _put(run: ScriptRun, members: list[Any]) -> None:
        """On the optimizers themselves, and there alone, so that all go when the script lets go of them."""
        for member in members:
            member._nanproof_watched = run

    def sorted_out(self, watching: list[ScriptRun]) -> tuple[list[ScriptRun], list[ScriptRun]]:
        """Those that a backward may concern, and those that none has reached for long, such as the optimizer of a model that is
        trained already."""
        active = [run for run in watching if self.backwards - run.reached <= RECENT] or watching
        return active, [run for run in watching if run not in active]
