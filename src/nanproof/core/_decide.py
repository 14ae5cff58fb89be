"""Decide what becomes of a step: a pure function from what is known to one decision, which is plain
data.

Nothing here acts. The engine carries a decision out. Where that turns out to be impossible (the fix
does not hold, no good state can be read), it strikes the means from the situation and asks again,
so the order of the rules below is the order in which things are tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from nanproof._policy import Policy

Trouble = Literal["none", "step", "finding", "divergence", "signal", "state", "exception", "generation"]
"""What a decision is about: nothing; a refused step; a spike that turned out to be something; a
loss that grows without end; a silent failure; a copy of the state that is not finite; an exception;
rows that could not be sampled."""


@dataclass(frozen=True, slots=True)
class Accept:
    """Leave things as they are."""


@dataclass(frozen=True, slots=True)
class Skip:
    """The step is not taken."""


@dataclass(frozen=True, slots=True)
class RunAgain:
    """Go on under a verified fix; a step that was not taken is run again."""

    remedy: str


@dataclass(frozen=True, slots=True)
class Salvage:
    """Take the step without these samples, or, where there are none, without its bad
    micro-batch."""

    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GoBack:
    """Go back to a good state of at most step `before`. The trouble lies in the steps `since` to
    `until`."""

    before: int
    since: int
    until: int
    blame_data: bool
    """Whether the batches of those steps are skipped at once, or only if they break the run a
    second time."""


@dataclass(frozen=True, slots=True)
class Halt:
    """Stop the run: it cannot go on without hiding a bug."""

    cap: str
    """The limit that was reached; see `Incident.cap`."""


Decision: TypeAlias = Accept | Skip | RunAgain | Salvage | GoBack | Halt


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """What is known when a decision is due."""

    trouble: Trouble = "none"
    step: int = 0
    """The last step that is concerned."""
    since: int = 0
    """The first step of the trouble."""
    state_broken: bool = False
    """Weights, optimizer state or loss scale were non-finite before the step."""
    remedy: str | None = None
    """A verified fix that was not tried yet."""
    samples: tuple[int, ...] | None = None
    """What the step could be taken without; None where that is not known."""
    cap: str | None = None
    """The limit that this step reaches if it counts as refused."""
    may_go_back: bool = False
    """There may be a good state to go back to."""
    has_good: bool = False
    """There has been a good state."""
    exhausted: bool = False
    """The run went back because of this trouble as often as it may."""


def decide(s: Situation, policy: Policy) -> Decision:
    """What to do next, given what is known."""
    if s.exhausted:
        return Halt("max_rollbacks")
    rolls_back = policy.on_divergence if s.trouble == "divergence" else policy.at_cap
    back = s.may_go_back and rolls_back == "rollback"
    match s.trouble:
        case "step":
            return _refused(s, back)
        case "divergence" if back:
            # Where it can be healed the data is not to blame, unless it happens again.
            return GoBack(s.since, s.since, s.step, blame_data=not policy.heal)
        case "state" if back:
            return GoBack(s.step, 0, s.step, blame_data=False)
        case "state" if policy.at_cap == "halt" and s.has_good:
            return Halt("broken-state")
        case "generation" if s.cap is not None:
            return GoBack(s.step, s.step, s.step, blame_data=False) if back else Halt(s.cap)
    return RunAgain(s.remedy) if s.remedy is not None else Accept()


def _refused(s: Situation, back: bool) -> Decision:
    """A step that was not taken. What repairs the run comes first, then what saves the step, then
    the cap."""
    if s.state_broken and back:  # what broke the state came before this step
        return GoBack(s.step - 1, s.step - 1, s.step, blame_data=False)
    if s.remedy is not None:
        return RunAgain(s.remedy)
    if s.samples is not None and not s.state_broken:
        return Salvage(s.samples)
    if s.cap is None:
        return Skip()
    if back and not s.state_broken:
        return GoBack(s.since, s.since, s.step, blame_data=True)
    return Halt(s.cap)
