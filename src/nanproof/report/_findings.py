"""A run's folder as `nanproof doctor` shows it: first what the run recorded, each incident with its
count, cause, fix and bundle; then what the curves of the accepted steps show in addition."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from nanproof._text import shown
from nanproof._wording import place, spans
from nanproof.files._parts import STEPS
from nanproof.logs._curve import Place
from nanproof.logs._story import Story
from nanproof.logs.judge._finding import PROTECT, REPLAY, REPORT, RUN, Finding, Likely, Recorded
from nanproof.logs.judge._findings import judge
from nanproof.logs.read._sources import Source
from nanproof.report.folder._run import Run
from nanproof.report.folder._troubles import Trouble, troubles
from nanproof.report.page._contents import optimizers

_LONGEST = 4000
"""Characters of a text that are shown."""
_RUINED = {"nonfinite-weight": "recorded", "exception": "recorded"}
"""By kind: the action after which the weights are lost, or the program ended."""
_SCALER = ("scaler-skipping", "scale-collapse")
"""What only a run with a loss scaler can show."""
_DIRECTION = ("divergence", "plateau", "spike")
"""What is wrong only with a loss that should fall. Those of several optimizers, as in a GAN, may work against each other."""


def run_of(source: Source) -> Run | None:
    """Return the run that a log belongs to, if nanproof wrote it and its folder is there."""
    if source.format != "nanproof" or not source.files or source.files[-1].name != STEPS:
        return None
    return Run(source.files[-1].parent).read()


def account(run: Run) -> dict[str, Any]:
    """Return what a run recorded, in numbers: as `report` and `watch` count it."""
    total = run.total
    halts = [part.halted.step for part in run.parts if part.halted is not None]
    return {
        "state": run.state,
        "steps": total["steps"],
        "refused": total["skipped"],
        "incidents": total["incidents"],
        "halted": halts[0] if halts else None,
        "optimizers": optimizers(run),
    }


def recorded(run: Run) -> tuple[Finding, ...]:
    """Return a finding for each group of incidents, of all optimizers: worst first, then by step."""
    found = [_finding(run, trouble) for trouble in troubles(run)]
    return tuple(sorted(found, key=lambda finding: (finding.rank[0], finding.place.step or 0)))


def inferred(story: Story, taken: Story, part: Run | None, run: Path) -> tuple[Finding, ...]:
    """Return what the curves of one optimizer show besides its recorded incidents. `taken` are the
    steps that were taken: a refused step did no harm, and its incident explains it. Without the
    incidents, all steps of `story` are judged. `run`: the folder of the run."""
    incidents = [] if part is None else part.incidents
    scaled = any(segment.track("scale").count for segment in story.segments)
    left_out = {incident.kind for incident in incidents}
    left_out.update(() if scaled else _SCALER, _DIRECTION if part is not None and part.optimizer else ())
    refused = story.refused
    guarded = []
    for finding in judge(taken if incidents else story):
        if finding.kind in left_out:
            continue
        said = finding.said
        if refused and not incidents and finding.kind in ("nan", "inf", "nan-gradient"):
            said += f" The guard has refused {refused} step{'s' * (refused > 1)}, which the weights have not seen."
        commands = tuple(command for command in finding.commands if command not in (PROTECT, RUN))
        commands = (REPORT.format(run=run), *commands)
        guarded.append(replace(finding, said=said, commands=commands, optimizer="" if part is None else part.optimizer))
    return tuple(guarded)


def _finding(run: Run, trouble: Trouble) -> Finding:
    first, diagnosis, bundle = trouble.first, trouble.origin.diagnosis, trouble.bundle
    parts = (first.message, first.outcome, trouble.again)
    commands = (REPORT.format(run=run.folder), *([] if bundle is None else [REPLAY.format(bundle=bundle)]))
    return Finding(
        kind=first.kind,
        severity=_severity(trouble),
        place=Place(step=first.step),
        said=shown(" ".join(f"{text[0].upper()}{text[1:].rstrip('. ')}." for text in parts if text), _LONGEST),
        causes=(Likely("The guard found it", diagnosis.cause),) if diagnosis is not None and diagnosis.named else (),
        commands=commands,
        optimizer=trouble.part.optimizer,
        recorded=Recorded(
            action=first.action,
            count=len(trouble.incidents),
            steps=spans(incident.step for incident in trouble.incidents),
            cause=None if diagnosis is None else diagnosis.cause,
            where="" if diagnosis is None else shown(place(diagnosis), _LONGEST),
            source=None if diagnosis is None or diagnosis.source is None else shown(diagnosis.source, _LONGEST),
            fix=None if diagnosis is None or diagnosis.fix is None else shown(diagnosis.fix, _LONGEST),
            verified=diagnosis is not None and diagnosis.verified,
            bundle=None if bundle is None else str(bundle),
        ),
    )


def _severity(trouble: Trouble) -> str:
    """A refused step did no harm. A halt ended the run, unless it was resumed and went on."""
    first = trouble.first
    if trouble.part.halted in trouble.incidents or _RUINED.get(first.kind) == first.action:
        return "failure"
    return "note" if first.kind == "spike" else "warning"
