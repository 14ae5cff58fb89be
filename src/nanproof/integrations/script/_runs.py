"""ScriptRuns: the optimizers of a script, each in the run that guards it."""

from __future__ import annotations

import weakref
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanproof.core.judge._parameters import is_dtensor
from nanproof.core.support._index import next_folder, write_index
from nanproof.integrations._groups import RECENT, Groups, leaf_tensors
from nanproof.integrations.script._first_calls import FirstCalls
from nanproof.integrations.script._script_run import ScriptRun
from nanproof.integrations.script._session import Session


class UnguardedSteps:
    """Detects a script that trains without an optimizer of torch: by hand, or with a class of its own.

    It reads a few elements of one weight at each backward, which waits for the device, until the first step of an optimizer.
    """

    CERTAIN = 2
    """Changes between two backwards that prove it: one may be a checkpoint that was loaded."""
    LARGEST = 4096
    """Elements of a weight that are looked at."""

    def __init__(self) -> None:
        self._weight: Any = None
        self._before: Tensor | None = None
        self._changes = self._steps = 0

    def at_backward(self, tensors: Any) -> bool:
        """A backward begins from here. Return whether weights changed often enough since the first one."""
        weight = None if self._weight is None else self._weight()
        if weight is None:
            self._before = None
            leaves = [leaf for leaf in islice(leaf_tensors(tensors), RECENT) if not is_dtensor(leaf)]
            # Inputs that get a gradient change with every batch.
            leaves = [leaf for leaf in leaves if isinstance(leaf, nn.Parameter)] or leaves
            if not leaves:
                return False
            weight = min(leaves, key=Tensor.numel)
            self._weight = weakref.ref(weight)
        now = weight.detach().reshape(-1)[: self.LARGEST].clone()
        self._changes += self._before is not None and not torch.equal(self._before, now)
        self._before = now
        return self._changes >= self.CERTAIN

    def at_step(self) -> bool:
        """An optimizer of torch steps without a gradient. Return whether that happened often enough."""
        self._steps += 1
        return self._steps > self.CERTAIN


class ScriptRuns(Groups[ScriptRun]):
    """Which runs there are, and what they have in common."""

    def __init__(self, session: Session) -> None:
        super().__init__()
        self._session = session
        self._all: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._order: list[weakref.ref[ScriptRun]] | None = None
        """The runs by number, until an optimizer gets another one."""
        self.last_loss: Any = None
        """Of the last backward."""
        self.first_calls = FirstCalls()
        self._unguarded: UnguardedSteps | None = UnguardedSteps()
        """Until an optimizer steps, guarded or left alone with its reason."""

    def see(self, optimizer: Optimizer) -> None:
        """An optimizer was made."""
        if self._session.guarding and optimizer not in self._all:
            self._all.add(optimizer)
            self._put(ScriptRun([optimizer], self._session), [optimizer])
            self._session.seen = True
            if not self._session.compiles:
                self.first_calls.watch()

    def watched(self, optimizer: Optimizer) -> ScriptRun | None:
        """None where the step is none of nanproof's business."""
        if not self._session.guarding:
            return None
        self.see(optimizer)
        run = self.of(optimizer)
        return None if run.left_alone else run

    def at_backward(self, tensors: Any) -> None:
        super().at_backward(tensors)
        steps, certain = self._unguarded, False
        if steps is None:
            return
        try:
            certain = steps.at_backward(tensors)
        except Exception:  # a weight that cannot be compared: sparse, say
            self._unguarded = None
        if certain:
            self._say_unguarded("weights change, but no optimizer of torch takes a step after a backward")
        elif self.backwards > RECENT:
            self._unguarded = None

    def at_step(self, optimizer: Optimizer) -> ScriptRun:
        run = super().at_step(optimizer)
        if run.started or run.left_alone:
            self._unguarded = None
        elif self._unguarded is not None and self._unguarded.at_step():
            self._say_unguarded(f"{run.tally.name} takes steps, but none of its parameters has a gradient")
        return run

    def _say_unguarded(self, why: str) -> None:
        """Say once that training goes on past nanproof. The summary would be too late."""
        self._unguarded = None
        if not self._session.trainers and not any(tally.calls or not tally.guarded for tally in self._session.tallies):
            self._session.say(f"nothing is guarded so far: {why}")

    def of(self, optimizer: Any) -> ScriptRun:
        run: ScriptRun = optimizer._nanproof_watched
        return run

    def every(self) -> list[ScriptRun]:
        return [run for ref in self._ordered() if (run := ref()) is not None]

    def _ordered(self) -> list[weakref.ref[ScriptRun]]:
        if self._order is None:
            runs = {id(run): run for run in map(self.of, self._all)}
            self._order = [weakref.ref(run) for run in sorted(runs.values(), key=lambda run: run.number)]
        return self._order

    def guarded(self) -> list[ScriptRun]:
        found: list[ScriptRun] = []
        if self._session.guarding:
            for ref in self._order or self._ordered():
                run = ref()
                if run is not None and run.guard is not None and not run.left_alone:
                    found.append(run)
        return found

    def begin(self, group: ScriptRun, at_step: bool) -> None:
        session = self._session
        run_dir = session.options.run_dir
        if run_dir is not None:
            run_dir = next_folder(run_dir, (tally.run_dir for tally in session.tallies))
        try:
            group.start(run_dir, self.last_loss if at_step else None, self.first_calls)
        except Exception as error:
            group.leave_alone(f"{type(error).__name__}: {error}")
        group.reached = group.fed = self.backwards
        session.tallies.append(group.tally)
        if all(run.started or run.left_alone for run in self.every()):
            self.first_calls.stop()
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

    def mark(self) -> None:
        """The script is between two forwards, and may draw random numbers for the next."""
        for run in self.guarded():
            run.mark()

    def raised(self, error: BaseException) -> None:
        """The script ends with this: an incident, where a step had begun."""
        for run in self.every():
            if run.left_alone:
                continue
            if not run.started and self.first_calls.lines.called and run.can_start(at_step=True):
                self.begin(run, at_step=False)
                run.adopt(self.first_calls)
            run.raised(error)

    def _put(self, run: ScriptRun, members: list[Any]) -> None:
        """On the optimizers themselves, and there alone, so that all go when the script lets go of them."""
        self._order = None
        for member in members:
            member._nanproof_watched = run

    def sorted_out(self, watching: list[ScriptRun]) -> tuple[list[ScriptRun], list[ScriptRun]]:
        """Those that a backward may concern, and those that none has reached for long, such as the optimizer of a model that is
        trained already."""
        active = [run for run in watching if self.backwards - run.reached <= RECENT] or watching
        return active, [run for run in watching if run not in active] if len(active) < len(watching) else []
