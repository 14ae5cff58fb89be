"""What a probe is and what it returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from nanproof._records import Diagnosis

if TYPE_CHECKING:
    from nanproof.probes._probing import Probing


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What one probe did and saw."""

    name: str
    did: str
    """What was changed, as a sentence without a period."""
    saw: str
    """What changed with it."""
    diagnosis: Diagnosis | None = None
    """What is wrong; None if nothing is."""

    def __str__(self) -> str:
        return f"{self.name}: {self.did}; {self.saw}"

    def to_json(self) -> dict[str, Any]:
        found = None if self.diagnosis is None else self.diagnosis.cause
        return {"name": self.name, "did": self.did, "saw": self.saw, "found": found}


class Probe(Protocol):
    """A question about a training step. It yields a result for each answer, and nothing where the
    question does not apply."""

    def __call__(self, probing: Probing, /) -> Iterator[ProbeResult]: ...


def finding(
    name: str,
    did: str,
    saw: str,
    fix: str,
    *,
    cause: str | None = None,
    confidence: float = 0.95,
    evidence: tuple[str, ...] = (),
    **place: Any,
) -> ProbeResult:
    """A result with its diagnosis. The probe showed the effect and its control, so it is verified."""
    diagnosis = Diagnosis(
        cause=cause or name,
        confidence=confidence,
        evidence=(f"{did}: {saw}", *evidence),
        fix=fix,
        verified=True,
        **place,
    )
    return ProbeResult(name, did, saw, diagnosis)
