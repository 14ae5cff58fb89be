"""What happened in a run under `nanproof run`, for a person and for a program."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanproof.errors import TrainingHalted
from nanproof.integrations.session import Session
from nanproof.records import Incident

_SHOWN = 10
"""Incidents that are listed; the others are counted."""


@dataclass(frozen=True, slots=True)
class Guarded:
    """One optimizer, or one trainer."""

    name: str
    path: str
    guarded: bool
    steps: int
    refused: int
    overflows: int
    incidents: tuple[Incident, ...]
    notes: tuple[str, ...]
    run_dir: Path | None
    own_seconds: float
    """In nanproof's own code, on the host, in all healthy steps; the optimizer, backward and clipping are not counted."""
    trouble_seconds: float
    """Dealing with bad steps: finding out what they were, and diagnosis."""
    span_seconds: float
    """From the end of the first step to the end of the last."""

    def lines(self) -> list[str]:
        if not self.guarded:
            return [f"{self.name}: {self.path}"]
        skipped = f", {self.refused} refused" if self.refused else ", none refused"
        skipped += f", {self.overflows} left out by the GradScaler" if self.overflows else ""
        told = [f"{self.name} ({self.path}): {self.steps} steps{skipped}"]
        for incident in self.incidents[:_SHOWN]:
            why = f". {incident.diagnosis}" if incident.diagnosis is not None else ""
            told.append(f"  {incident}{why}" + (f" Bundle: {incident.bundle}" if incident.bundle else ""))
        if len(self.incidents) > _SHOWN:
            told.append(f"  and {len(self.incidents) - _SHOWN} more incidents")
        told += [f"  {note}" for note in self.notes]
        if self.steps > 1 and self.span_seconds > 0:
            each = self.own_seconds / self.steps
            share = each / (self.span_seconds / (self.steps - 1))
            told.append(
                f"  nanproof's own host time: {each * 1e3:.2f} ms a step ({share:.1%} of the time between steps; the optimizer, "
                "backward and clipping are not counted)"
            )
        if self.trouble_seconds:
            told.append(f"  dealing with bad steps: {self.trouble_seconds:.2f} s")
        if self.run_dir is not None:
            told.append(f"  records and bundles: {self.run_dir}")
        return told

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "path": self.path,
            "guarded": self.guarded,
            "steps": self.steps,
            "refused": self.refused,
            "overflows": self.overflows,
            "incidents": [incident.to_json() for incident in self.incidents],
            "notes": list(self.notes),
            "run_dir": None if self.run_dir is None else str(self.run_dir),
            "own_seconds": self.own_seconds,
            "trouble_seconds": self.trouble_seconds,
            "span_seconds": self.span_seconds,
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """Of a whole script."""

    command: str
    seconds: float
    rank: int
    halted: str | None
    guarded: tuple[Guarded, ...]

    def lines(self) -> list[str]:
        shown = [g for g in self.guarded if g.steps or not g.guarded]
        if not shown:
            return ["nothing was guarded: no optimizer of torch took a step after a backward"]
        return [line for g in shown for line in g.lines()]

    def to_json(self) -> dict[str, Any]:
        return {
            "v": 1,
            "command": self.command,
            "seconds": self.seconds,
            "halted": self.halted,
            "guarded": [g.to_json() for g in self.guarded],
        }


def summary_of(session: Session, command: str, seconds: float, error: BaseException | None) -> Summary:
    found = [
        Guarded(
            name=t.name,
            path=t.path,
            guarded=t.guarded,
            steps=t.steps,
            refused=t.refused,
            overflows=t.overflows,
            incidents=tuple(t.incidents),
            notes=tuple(t.notes),
            run_dir=t.run_dir,
            own_seconds=t.own,
            trouble_seconds=t.trouble,
            span_seconds=t.last - t.first,
        )
        for t in session.tallies
    ]
    for name, guard in session.trainers:
        found.append(
            Guarded(
                name=name,
                path=guard.path,
                guarded=guard.started,
                steps=guard.next_step,
                refused=guard.refused_so_far,
                overflows=0,
                incidents=tuple(guard.incidents),
                notes=(),
                run_dir=getattr(guard, "_run_dir", None),
                own_seconds=0.0,
                trouble_seconds=0.0,
                span_seconds=0.0,
            )
        )
    halted = str(error) if isinstance(error, TrainingHalted) else None
    return Summary(command, seconds, session.rank, halted, tuple(found))
