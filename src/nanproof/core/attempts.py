"""Steps under way, and how to go back before a bad one without undoing what the user's own code did meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.optim import Optimizer

from nanproof.core.context import Groups, Mode, RandomState, Schedule, change_settings, changed_settings
from nanproof.core.stepper import Report


@dataclass(slots=True)
class Attempt:
    """One step on its way from dispatch to record."""

    step: int
    batches: tuple[Any, ...] | None
    """None for a step of the user's own loop, which cannot be run again."""
    mode: Mode | None = None
    changes: Groups = field(default_factory=list)
    """Settings that the user's own code changed before this step, when it is run again."""
    random: RandomState | None = None
    random_after: RandomState | None = None
    schedule: Schedule | None = None
    """With a lag only: without one, nothing of a refused step's schedule has happened yet."""
    settings_after: Groups | None = None
    report: Report | None = None
    tickets: list[list[Any]] = field(default_factory=list)
    """What the wrapped loaders handed out for this step."""
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    """What the model was called with, a backward: for a step that cannot be run again, where somebody noted it."""
    parted: bool = False
    """What is left of a batch after something bad was taken out of it."""
    remarks: list[Callable[[], str]] = field(default_factory=list)
    """One a micro-batch, by whoever looked at it: what an incident of this step should say. Asked only then, for it may wait."""

    def refused(self) -> bool:
        """Waits. The report can still be read afterwards, which it otherwise can once."""
        assert self.report is not None
        reading = self.report.read()
        self.report = replace(self.report, read=lambda: reading)
        return reading.refused

    def take_changes(self) -> Groups:
        """Once: run yet again, the step goes back to settings that hold them already."""
        changes, self.changes = self.changes, []
        return changes


@dataclass(frozen=True, slots=True)
class Afterwards:
    """What to set once the held batches have been run again: random numbers and settings that are the user's business.

    A generator that the user's code drew from between steps (a data loader's, say) goes on where it was: rewinding that one
    would repeat data. Settings that the user's code changed are changed again.
    """

    random: RandomState
    changes: Groups

    def apply(self, optimizer: Optimizer) -> None:
        self.random.restore()
        change_settings(optimizer, self.changes)


def to_run_again(
    bad: Attempt, behind: Sequence[Attempt], random_now: RandomState, settings_now: Groups, scheduled: bool = False
) -> tuple[list[Attempt], Afterwards | None]:
    """The attempts behind a bad one, made anew, each with what the user's code changed before it; and what comes afterwards.

    One that cannot be run again was not held: what it drew is drawn. `scheduled`: the schedule that advanced after it goes back
    and is advanced anew, so it is not taken for a change that the user's code made.
    """
    if bad.schedule is None:
        return [], None
    again: list[Attempt] = []
    drawn: set[str] = set()
    earlier, between = bad, False
    for later in behind:
        if later.batches is None:
            between = True
            continue
        assert later.random is not None and later.schedule is not None
        assert earlier.random_after is not None and earlier.settings_after is not None
        drawn |= later.random.moved_since(earlier.random_after)
        changes = [] if between and scheduled else changed_settings(earlier.settings_after, later.schedule.groups)
        again.append(Attempt(later.step, later.batches, later.mode, changes, tickets=later.tickets, parted=later.parted))
        earlier, between = later, False
    assert earlier.random_after is not None and earlier.settings_after is not None
    drawn |= random_now.moved_since(earlier.random_after)
    changes = [] if between and scheduled else changed_settings(earlier.settings_after, settings_now)
    return again, Afterwards(random_now.only(drawn), changes)
