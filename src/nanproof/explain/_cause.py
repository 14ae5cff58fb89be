"""Cause: an entry of the catalogue. A subclass in one of the files of `causes/` is all it takes to add one.

A cause says whether a case fits (`match`), in sentences with numbers, and how sure that is. A match may carry a trial: a control
and an intervention on the replay that show whether the fix holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from nanproof.explain._case import Case, Trial
from nanproof.explain.locate._locate import Birth


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A cause that fits a case."""

    confidence: float
    """0 to 1: how well the evidence fits this cause and no other."""
    evidence: tuple[str, ...]
    phase: str
    """What went bad first: batch, weights, buffer, forward, loss, backward, optimizer, data."""
    where: str | None = None
    op: str | None = None
    source: str | None = None
    samples: tuple[int, ...] | None = None
    tokens: tuple[int, ...] = ()
    trial: Callable[[], Trial] | None = None
    """Tries the fix on the replay."""
    tried: str = ""
    """The fix that was tried, as the end of "with ...": "the input of exp clamped"."""
    on: str = "the replay"
    """What it was tried on."""
    fix: str = ""
    """Where it can be said more exactly than for the cause in general."""


class Cause:
    """An entry of the catalogue."""

    slug: ClassVar[str]
    fix: ClassVar[str]
    """One or two sentences that a practitioner can act on."""
    costly: ClassVar[bool] = False
    """Matching takes runs of its own: looked at only where no other cause fits well."""
    specific: ClassVar[int] = 1
    """How little its trial changes. Where the fixes of two causes hold, the more specific cause is named: 0 for a change that
    would cure many things (every weight scaled down), 1 for one kind of operation, 2 for one mistake at one place."""
    catalogue: ClassVar[list[Cause]] = []

    def __init_subclass__(cls) -> None:
        if "slug" in cls.__dict__:
            Cause.catalogue.append(cls())

    def match(self, case: Case) -> Match | None:
        """How this cause fits the case; None if it does not."""
        raise NotImplementedError


def at_birth(
    birth: Birth,
    confidence: float,
    evidence: str,
    trial: Callable[[], Trial],
    tried: str,
    *,
    op: str | None = None,
    fix: str = "",
) -> Match:
    """A match at the operation in which the trouble was born."""
    return Match(
        confidence=confidence,
        evidence=(evidence,),
        phase="backward" if birth.in_backward else "forward",
        where=birth.op.path,
        op=op or birth.op.name.strip("_"),
        source=birth.op.source or None,
        samples=birth.samples,
        tokens=birth.tokens,
        trial=trial,
        tried=tried,
        fix=fix,
    )
