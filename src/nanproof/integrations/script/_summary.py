"""What happened in a run under `nanproof run`, for a person and for a program."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nanproof._errors import TrainingHalted
from nanproof._records import Forecast, Incident, alike, halt
from nanproof._text import printable
from nanproof._wording import repeated
from nanproof.integrations.script._session import Session

_SHOWN = 10
"""Groups of incidents, and forecasts, that are listed; the others are counted."""
_PREFIX = "nanproof: "


@dataclass(frozen=True, slots=True)
class Guarded:
    """One optimizer, or one trainer."""

    name: str
    model: str
    """Class of the model, where it is known."""
    path: str
    verdicts: str
    """The same in words, without the names of settings that the user never made."""
    guarded: bool
    steps: int
    refused: int
    overflows: int
    incidents: tuple[Incident, ...]
    forecasts: tuple[Forecast, ...]
    """With `--observe`."""
    run_dir: Path | None
    own_seconds: float
    """In nanproof's own code, on the host, within the span; the optimizer, backward, clipping, diagnoses and looking for the
    model are not counted."""
    trouble_seconds: float
    """Looking into bad steps: finding out what they were, and diagnosis."""
    span_seconds: float
    """From the end of the first step, before any trouble with it was looked into, to the end of the last."""
    newest: int | None = None
    """The newest step on record."""

    @property
    def halted(self) -> Incident | None:
        """The incident after which it took no further step."""
        return halt(self.incidents, self.newest)

    def lines(self) -> list[str]:
        """Each is a sentence or two; what belongs under another is indented by two spaces more."""
        name = f"{self.name} of {self.model}" if self.model else self.name
        if not self.guarded:
            return [f"{name}: {self.path}"]
        skipped = f", {self.refused} refused" if self.refused else ", none refused"
        skipped += f", {self.overflows} left out by the GradScaler" if self.overflows else ""
        if self.halted is not None:
            skipped += f", halted at step {self.halted.step}"
        told = [f"{name}: {self.steps} steps{skipped} ({self.verdicts})"]
        groups = [[self.incidents[i] for i in group.members] for group in alike(self.incidents)]
        for group in groups[:_SHOWN]:
            told += _lines_of(group)
        if len(groups) > _SHOWN:
            told.append(f"  and {sum(map(len, groups[_SHOWN:]))} more incidents")
        told += [f"  {forecast}" for forecast in self.forecasts[:_SHOWN]]
        if len(self.forecasts) > _SHOWN:
            told.append(f"  and {len(self.forecasts) - _SHOWN} more forecasts")
        if self.steps > 1 and self.own_seconds > 0:
            each = self.own_seconds / (self.steps - 1)
            share = self.own_seconds / max(self.span_seconds - self.trouble_seconds, self.own_seconds)
            told.append(
                f"  nanproof's own host time: {each * 1e3:.2f} ms a step, which hardly grows with the model (here {share:.1%} of "
                "the time between steps; optimizer, backward, clipping and diagnoses are not counted)"
            )
        if self.trouble_seconds:
            told.append(f"  dealing with bad steps: {self.trouble_seconds:.2f} s")
        if self.run_dir is not None:
            bundles = " and bundles" if any(incident.bundle for incident in self.incidents) else ""
            told.append(f"  records{bundles}: {self.run_dir}")
        return told

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "model": self.model,
            "path": self.path,
            "guarded": self.guarded,
            "steps": self.steps,
            "refused": self.refused,
            "overflows": self.overflows,
            "halted": None if self.halted is None else self.halted.step,
            "incidents": [incident.to_json() for incident in self.incidents],
            "forecasts": [forecast.to_json() for forecast in self.forecasts],
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
    failed_early: bool
    """The script ended with an error before it made an optimizer: there is nothing to tell."""
    guarded: tuple[Guarded, ...]

    def lines(self) -> list[str]:
        shown = [g for g in self.guarded if g.steps or not g.guarded]
        if shown:
            return [line for g in shown for line in g.lines()]
        return [] if self.failed_early else ["nothing was guarded: no optimizer of torch took a step after a backward"]

    def wrapped(self, width: int) -> list[str]:
        """The lines as they are printed; what a line goes on with stands under it."""
        out: list[str] = []
        for line in self.lines():
            text = printable(line.lstrip(" ").replace("\n", " "))
            indent = " " * (len(_PREFIX) + len(line) - len(text))
            first = _PREFIX + indent[len(_PREFIX) :]
            out += textwrap.wrap(
                text,
                max(width, 60),
                initial_indent=first,
                subsequent_indent=indent + "  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
        return out

    def to_json(self) -> dict[str, Any]:
        return {
            "v": 1,
            "command": self.command,
            "seconds": self.seconds,
            "halted": self.halted,
            "guarded": [g.to_json() for g in self.guarded],
        }


def _lines_of(group: list[Incident]) -> list[str]:
    first, *others = group
    lines = [f"  {first}"]
    if first.diagnosis is not None:
        lines.append(f"    {first.diagnosis}")
    if others:
        lines.append(f"    {repeated(first, [incident.step for incident in others])}")
    bundles = [_from_here(incident.bundle) for incident in group if incident.bundle]
    if bundles:
        lines.append(f"    bundle: {bundles[0]}" + (f" and {len(bundles) - 1} more" if len(bundles) > 1 else ""))
    return lines


def _from_here(path: str) -> str:
    here = Path.cwd()
    return str(Path(path).relative_to(here)) if Path(path).is_relative_to(here) else path


def summary_of(session: Session, command: str, seconds: float, error: BaseException | None) -> Summary:
    found = [
        Guarded(
            name=t.name,
            model=t.model,
            path=t.path,
            verdicts=t.verdicts,
            guarded=t.guarded,
            steps=t.steps,
            refused=t.refused,
            overflows=t.overflows,
            incidents=tuple(t.incidents),
            forecasts=tuple(t.forecasts),
            run_dir=t.run_dir,
            own_seconds=t.own,
            trouble_seconds=t.trouble,
            span_seconds=t.last - t.first,
            newest=t.newest,
        )
        for t in session.tallies
    ]
    for name, guard in session.trainers:
        found.append(
            Guarded(
                name=name,
                model="",
                path=guard.path,
                verdicts=guard.verdicts,
                guarded=guard.started,
                steps=guard.next_step,
                refused=guard.refused_so_far,
                overflows=0,
                incidents=tuple(guard.incidents),
                forecasts=tuple(guard.forecasts),
                run_dir=guard.run_dir,
                own_seconds=0.0,
                trouble_seconds=0.0,
                span_seconds=0.0,
                newest=guard.account.history[-1].step if guard.account.history else None,
            )
        )
    halts = [g.halted for g in found if g.halted is not None]  # the script may have caught the exception
    halted = str(error) if isinstance(error, TrainingHalted) else str(halts[0]) if halts else None
    well = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
    return Summary(command, seconds, session.rank, halted, not well and not session.seen and not found, tuple(found))
