"""What the engine expects of those who look on, explain, recover and heal.

The engine is in the lowest layer and knows none of them. Each class here is a whole part that does
nothing, so an engine can do without any of them; the real ones in `observe`, `explain` and
`recover` inherit from it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

from torch import Tensor

from nanproof._records import Forecast, Incident, StepRecord
from nanproof.core._decide import GoBack
from nanproof.core._evidence import Gradients
from nanproof.core._under_way import Attempt
from nanproof.core.judge._verdict import Reading

log = logging.getLogger("nanproof")
_NOTHING = nullcontext()


class Observer:
    """Looks on while steps are taken. Every moment may be ignored."""

    name = ""
    """Under which its state is saved; empty where it has none."""
    off = False
    """It has stopped looking."""

    def stop(self) -> None:
        """Look no more."""
        self.off = True

    def open(self, attempt: Attempt) -> None:
        """A step begins: its first forward comes next."""

    def before(self, attempt: Attempt) -> None:
        """The gradients are there, and the optimizer is about to act."""

    def after(self, attempt: Attempt) -> None:
        """The optimizer has acted, on the device."""

    def dropped(self) -> None:
        """The step raised instead."""

    def rewound(self) -> None:
        """The run is at an earlier step, or in a new process: forget what came after it."""

    def close(self, alone: bool = False) -> None:
        """The run is over. `alone`: other ranks may not be coming."""

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""


def harmless(what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """For methods of an observer: looking is never the reason a run dies. Whatever goes wrong in
    one stops the observer, with a warning that says what is not done any more."""

    def decorate(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def tried(self: Observer, *args: Any) -> Any:
            if self.off:
                return None
            try:
                return method(self, *args)
            except Exception as error:
                log.debug("nanproof: %s failed", method.__name__, exc_info=True)
                log.warning("nanproof: %s any more: %s: %s", what, type(error).__name__, error)
                self.stop()
                return None

        return tried

    return decorate


class Lookout(Observer):
    """Observes activations, weights and attention."""

    def observed(self, record: StepRecord) -> StepRecord:
        """Return the record of a step, with what was observed."""
        return record

    def foresee(self, record: StepRecord) -> list[Forecast]:
        """Return what an accepted step says about those to come."""
        return []


@dataclass(frozen=True, slots=True)
class Refusal:
    """What is known of a refused step before it is explained."""

    attempt: Attempt
    reading: Reading
    record: StepRecord
    history: Sequence[StepRecord]
    buffer: str
    """The buffer that the forward made non-finite."""
    one_rank: bool
    """It was bad on one rank only."""


class Explainer(Observer):
    """Runs steps again and names causes."""

    @property
    def seconds(self) -> float:
        """Seconds that diagnoses have taken so far."""
        return 0.0

    def rehearse(self, attempt: Attempt) -> Gradients | None:
        """Run a step again, with all ranks, at a loss scale of 1, and look at its gradients. None
        if that cannot be done."""
        return None

    def noted(self, attempt: Attempt, loss: Tensor, spent: bool = False) -> None:
        """Called with the loss of a step, just before its backward. `spent`: in your own loop it may come after it, and what the
        graph kept for backward is gone."""

    def accepted(self, record: StepRecord, history: Sequence[StepRecord]) -> Incident | None:
        """Return the incident of a silent failure, if this accepted step completes the evidence for
        one."""
        return None

    def refused(self, incident: Incident, refusal: Refusal) -> Incident:
        """Return the incident of a refused step with its diagnosis, if one is due. Every rank comes
        here at the same step."""
        return incident

    def found(self, incident: Incident, record: StepRecord, history: Sequence[StepRecord]) -> Incident:
        """Return the incident of a spike or divergence, which was found some steps later, with its
        diagnosis."""
        return incident

    def raised(self, incident: Incident, attempt: Attempt, error: BaseException, history: Sequence[StepRecord]) -> Incident:
        """Return the incident of an exception with its diagnosis. Other ranks may not be coming."""
        return incident

    def at_close(self, incident: Incident, history: Sequence[StepRecord]) -> Incident:
        """Return the incident of a state that is non-finite at the end, with its diagnosis."""
        return incident

    def hand_over(self) -> Any:
        """Return the case of the last diagnosis, once, for the healer: it holds a batch."""
        return None

    def dealt_with(self, signal: str) -> None:
        """A silent failure was healed: look for it anew."""


@dataclass(frozen=True, slots=True)
class Restored:
    """A good state that the run went back to."""

    step: int
    place: str
    """ "memory", or the name of a checkpoint."""
    attempt: int
    stepped_over: int
    """Batches that the data skips."""
    remedies: dict[str, Any]
    """The healer's state at that time."""


class Recovery(Observer):
    """Keeps good states and goes back to them."""

    on = False
    """Whether states are kept at all."""
    possible = False
    """Whether states could be kept."""
    has_good = False
    """There has been a good state."""
    exhausted = False
    """The same trouble has sent the run back as often as it may."""
    backs = 0
    """How often the run went back."""

    def begun(self, attempt: Attempt) -> None:
        """A new step has a number, and its batches were handed out."""

    def stepped(self, next_step: int, own_loop: bool, settled: bool) -> list[str] | None:
        """A step was dispatched. Returns the names of broken tensors, if a copy of the state shows
        some."""
        return None

    def accepted(self, step: int, settled: bool) -> list[str] | None:
        """A step's verdict came: accepted. Returns the names of broken tensors, if a copy of the
        state shows some."""
        return None

    def refused(self) -> None:
        """A step's verdict came: refused."""

    def followed(self) -> str:
        """The model is made of other modules or parameters. Returns what that means for the states
        that were kept, in words."""
        return ""

    def go_back(self, decision: GoBack) -> Restored | None:
        """Go back to a good state. None where there is none, or the trouble has used up its
        attempts (`exhausted`)."""
        return None

    def keep_last(self, next_step: int, own_loop: bool) -> None:
        """The run is about to stop: copy its state, for another process to go on from."""

    def write_last(self) -> None:
        """Write what `keep_last` copied, once the loop has advanced its schedule."""

    def catch_up(self, backs: int) -> None:
        """All verdicts are in. `backs`: how often the run had gone back before that."""

    def knows_samples(self, attempt: Attempt) -> bool:
        """Whether the loaders can tell which samples a step is made of."""
        return False

    def rest_of(self, attempt: Attempt, micro_batch: int | None, rows: Sequence[int]) -> Attempt | None:
        """Return the step without these rows of a micro-batch, or without all of it; None where
        nothing would be left."""
        return None

    def quarantine(self, attempt: Attempt, incident: Incident) -> tuple[int, ...]:
        """Quarantine the samples that are to blame; returns their dataset indices."""
        return ()


class Healer(Observer):
    """Applies verified fixes to a living run, and takes back those that do not hold."""

    on = False

    def living(self, training: bool = True) -> AbstractContextManager[Any]:
        """Open this around every forward and backward: the fixes in force."""
        return _NOTHING

    def accepted(self) -> None:
        """A healthy step has passed under the fixes in force."""

    def undo_failed(self, incident: Incident) -> tuple[str, ...]:
        """Undo the fixes that did not hold against this incident; returns their descriptions."""
        return ()

    def offer(self, incident: Incident, case: Any) -> str | None:
        """Return the description of the next fix that was not tried for such an incident yet."""
        return None

    def apply(self, incident: Incident, case: Any) -> bool:
        """Put the offered fix in force. False, and undone, where the bad step is still bad under
        it."""
        return False

    def restored(self, state: dict[str, Any]) -> None:
        """The run went back to a state with these fixes in force."""
