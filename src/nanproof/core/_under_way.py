"""Steps under way: dispatched but not judged yet, or held behind a bad one. Going back before a bad
step undoes that step and nothing that the user's own code did meanwhile."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from nanproof.core.judge._judge import Judge, Norms, Report
from nanproof.core.support._context import Groups, Mode, RandomState, Schedule, change_settings, changed_settings, settings

LossFn = Callable[[nn.Module, Any], Tensor]
UNKNOWN: Final = object()
"""A micro-batch that cannot be run again."""

WRITES = "the step writes into its batch, so what the batch held before is gone; of later batches a copy is kept"


@dataclass(frozen=True, slots=True)
class Again:
    """How what a backward began from can be computed again."""

    batch: Any
    """For the loss function. `UNKNOWN`: not at all."""
    whole: bool = True
    """It gives the loss. If not, it gives the model's forward alone."""
    why_not: str = ""
    """Why it does not give the loss."""
    written: bool = False
    """Whether the step wrote into the batch, which is no longer what it was."""


class Begun(NamedTuple):
    """What is known of a step in a loop that does not say when its steps begin."""

    again: list[Again]
    calls: list[tuple[Any, ...]]
    random: RandomState
    mode: Mode


@dataclass(frozen=True, slots=True)
class Remark:
    """What somebody who looked at a micro-batch has to say about it."""

    text: str
    names_terms: bool = False
    """Whether it says which terms of the loss were bad."""


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
    """What the model was called with, a backward: for a step that cannot be run again, where
    somebody noted it."""
    parted: bool = False
    """What is left of a batch after something bad was taken out of it."""
    remarks: list[Callable[[], Remark]] = field(default_factory=list)
    """One a micro-batch, by whoever looked at it: what an incident of this step should say. Asked
    only then, for it may wait."""
    aside: list[Any] = field(default_factory=list)
    """Its micro-batches, where ranks may differ in whether a step can be run again: they are asked
    once it was refused."""
    again: list[Again] = field(default_factory=list)
    """One a backward, for a step of somebody's loop whose loss is computed in the loop: it can be
    run again to look at it, but it is never held."""
    keeps_random: bool = False
    """Whether random numbers go on where the loop left them when the step is refused."""
    unclipped: Norms | None = None
    """Norms of the gradients as the last backward left them, in a loop that writes into them before its step."""
    put_back_attributes: Callable[[], None] | None = None
    """Puts back the tensors that modules keep in plain attributes."""
    why_not_again: str = ""
    """Why it cannot be run again, where that is not the loop's general reason."""

    @property
    def whole(self) -> bool:
        """Whether every loss of the step can be computed again."""
        return bool(self.again) and all(again.whole for again in self.again)

    @property
    def why_not(self) -> str:
        """Why it cannot be run again, as far as that is known."""
        return next((again.why_not for again in self.again if again.why_not), self.why_not_again)

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
    """What to set once the held batches have been run again: random numbers and settings that are
    the user's business.

    A generator that the user's code drew from between steps (a data loader's, say) goes on where it
    was: rewinding that one would repeat data. Settings that the user's code changed are changed
    again.
    """

    random: RandomState
    changes: Groups

    def apply(self, optimizer: Optimizer) -> None:
        self.random.restore()
        change_settings(optimizer, self.changes)


def to_run_again(
    bad: Attempt, behind: Sequence[Attempt], random_now: RandomState, settings_now: Groups, scheduled: bool = False
) -> tuple[list[Attempt], Afterwards | None]:
    """The attempts behind a bad one, made anew, each with what the user's code changed before it;
    and what comes afterwards.

    One that cannot be run again was not held: what it drew is drawn. `scheduled`: the schedule that
    advanced after it goes back and is advanced anew, so it is not taken for a change that the
    user's code made.
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


class UnderWay:
    """The queues of a run's steps, and what each depends on besides its batch."""

    def __init__(self, judge: Judge, scheduler: Any) -> None:
        self.judge, self.scheduler = judge, scheduler
        self.pending: deque[Attempt] = deque()
        """Dispatched, their records not consumed yet."""
        self.held: deque[Attempt] = deque()
        """Good batches that a bad one held up, to be trained on again before anything else."""
        self.refresh()
        self.finishing: Attempt | None = None
        """A step after which the loop has not advanced its schedule yet."""
        self._afterwards: Afterwards | None = None

    def refresh(self) -> None:
        """The model is made of other modules, or lies on other devices."""
        self.devices = sorted({p.device for p in self.judge.parameters.tensors if p.device.type == "cuda"}, key=str)
        self.modules = list(self.judge.model.modules())

    @property
    def trains(self) -> bool:
        """A step that can be run again is under way."""
        return bool(self.held) or any(attempt.batches is not None for attempt in self.pending)

    def mode(self) -> Mode:
        """How a step that begins now is called."""
        return Mode.now(self.modules, self.judge.parameters.device)

    def note_start(self, attempt: Attempt) -> None:
        """Before the forward: note what the step depends on."""
        attempt.random = RandomState.now(self.devices)
        attempt.schedule = Schedule.now(self.judge.optimizer, self.scheduler) if self.judge.lag else None

    def note_end(self, attempt: Attempt) -> None:
        """After the optimizer: with a lag the step counts as accepted until its verdict comes."""
        if self.judge.lag:
            attempt.random_after = RandomState.now(self.devices)
            if self.scheduler is not None:
                self.scheduler.step()
            attempt.settings_after = settings(self.judge.optimizer)

    def put_back(self, bad: Attempt, random_now: RandomState, settings_now: Groups) -> None:
        """Back to before the bad step, and the batches behind it into `held`. Steps behind it that
        cannot be run again were not held: the optimizer has taken them, and their records are still
        to come."""
        self.pending.popleft()
        assert bad.random is not None
        bad.random.restore()
        if bad.keeps_random:
            self._afterwards = Afterwards(random_now, [])
            self.judge.release()
            return
        if bad.schedule is not None:
            bad.schedule.restore(self.judge.optimizer, self.scheduler)
        again, self._afterwards = to_run_again(bad, self.pending, random_now, settings_now, self.scheduler is not None)
        taken = [attempt for attempt in self.pending if attempt.batches is None]
        self.pending.clear()
        self.pending.extend(taken)
        for attempt in taken:
            if self.scheduler is not None and attempt is not self.finishing and not attempt.refused():
                self.scheduler.step()
        self.held.extend(again)
        self.judge.release()

    def drop_held(self) -> None:
        """What was held up is not trained on any more."""
        self.held.clear()
        self.return_to_user()

    def forget(self, keep_random: bool = False) -> None:
        """Steps under way are no longer of interest: other weights have been loaded. `keep_random`:
        generators that the user's own code drew from in between stay where it left them."""
        self.pending.clear()
        self.held.clear()
        if keep_random and self._afterwards is not None:
            self._afterwards.random.restore()
        self._afterwards = None
        self.judge.forget()
        self.judge.ranks.forget_gradients()
        self.judge.release()

    def return_to_user(self) -> None:
        """Random numbers and settings that belong to the user's own code go on where they were."""
        if self._afterwards is not None:
            self._afterwards.apply(self.judge.optimizer)
            self._afterwards = None
