"""`nanproof doctor`: what the log of a run shows: when it first went wrong, what that is, why, and what to do next."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nanproof._errors import NanproofError, UsageError
from nanproof._text import printable
from nanproof.cli._shared import could_not_run

if TYPE_CHECKING:
    from rich.console import Console

    from nanproof.logs._curve import Place
    from nanproof.logs._story import Story
    from nanproof.logs.judge._findings import Finding
    from nanproof.logs.read._sources import Source
    from nanproof.report.folder._run import Run

FEW = 6
WIDEST = 72
CHECKPOINTS = (".safetensors", ".pt", ".pth", ".ckpt", ".bin")
COLOURS = {"failure": "bold red", "warning": "bold yellow", "note": "bold"}


@dataclass(frozen=True, slots=True)
class Read:
    """A log that was read, as far as it could be."""

    path: str
    format: str
    story: Story
    findings: tuple[Finding, ...]
    """What a run of nanproof recorded, then what is inferred from the log; worst first."""
    error: str | None = None
    points: int = 0
    run: Run | None = None
    """The folder that the log is in, if nanproof wrote it."""

    @property
    def worst(self) -> Finding | None:
        return min(self.findings, key=lambda finding: finding.rank[0], default=None)

    @property
    def status(self) -> str:
        if self.worst is not None:
            return self.worst.severity
        if self.error is not None:
            return "unreadable"
        return "healthy" if self.points else "empty"

    @property
    def judged(self) -> bool:
        """Whether there are enough losses to judge the curve."""
        from nanproof.logs.judge._shape import ENOUGH

        return any(segment.track("loss").count >= ENOUGH for segment in self.story.segments)

    @property
    def nonfinite(self) -> bool:
        """Whether any value of training is NaN or Inf."""
        tracks = (track for segment in self.story.segments for track in (*segment.tracks.values(), *segment.terms.values()))
        return any(track.bad.count for track in tracks)

    @property
    def names(self) -> dict[str, str]:
        """By metric, what the log calls it."""
        return {metric: name for segment in self.story.segments for metric, name in segment.names.items()}

    @property
    def parts(self) -> list[str]:
        """Other values of training, by their names in the log."""
        return list(dict.fromkeys(name for segment in self.story.segments for name in segment.terms))

    def to_json(self) -> dict[str, Any]:
        from nanproof.report._findings import account

        first, last = self.story.segments[0].first, self.story.segments[-1].last
        return {
            "path": self.path,
            "format": self.format,
            "status": self.status,
            "points": self.points,
            "judged": self.judged,
            "names": self.names,
            "parts": self.parts,
            "runs": len(self.story.segments) + self.story.dropped,
            "first_step": first and first.step,
            "last_step": last and last.step,
            "error": self.error,
            "recorded": None if self.run is None else account(self.run),
            "findings": [finding.to_json() for finding in self.findings],
        }


def doctor(
    logs: Annotated[
        list[str],
        typer.Argument(
            metavar="LOG",
            help="Logs, or folders of them: what a run printed, trainer_state.json, JSON lines, CSV, TensorBoard, Weights & "
            "Biases, a folder of nanproof; .gz too. - is standard input.",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output instead.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings and notes count as failures too.")] = False,
) -> None:
    """Read logs of any framework and say what went wrong. Since when, what it can come from, and what to do next.

    Exit status: 1 a failure was found, 2 none was found and a log could not be read, or all were empty, 0 no failure.
    """
    read = list(examine(logs, alone=len(logs) == 1 and not as_json))
    if as_json:
        typer.echo(json.dumps({"v": 1, "logs": [each.to_json() for each in read]}, allow_nan=False))
    else:
        from rich.console import Console

        width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 1000  # lines stay whole for whoever searches in them
        show(Console(markup=False, highlight=False, emoji=False, width=width), read)
    found = {each.status for each in read}
    if "failure" in found or (strict and found & {"warning", "note"}):
        raise typer.Exit(1)
    if any(each.error for each in read) or not any(each.points or each.findings for each in read):
        raise typer.Exit(2)


def examine(logs: Sequence[str], alone: bool = False) -> Iterable[Read]:
    """Read every log that can be found. One that cannot does not stop the others, unless it is alone."""
    from nanproof.logs.read._sources import find

    try:
        sources = find(logs)
    except UsageError as error:
        if alone:
            raise could_not_run(error) from error
        sources = []
        for log in logs:
            try:
                sources += find([log])
            except UsageError as one:
                yield _nothing(log, str(one))
    yield from _read_all(sources)


def _nothing(path: str, error: str) -> Read:
    from nanproof.logs._story import Story

    return Read(path, "", Story(), (), error)


def _read_all(sources: Sequence[Source]) -> Iterable[Read]:
    """Read each log. The optimizers of one run are one log, which starts from what the run recorded."""
    from nanproof.files._parts import STEPS
    from nanproof.logs.read._sources import find
    from nanproof.report._findings import recorded, run_of

    runs = {source.files: run for source in sources if (run := run_of(source)) is not None}
    whole = {part.folder.resolve(): run for run in runs.values() for part in run.others}
    alone = [source for source in sources if not source.files or source.files[-1].parent.resolve() not in whole]
    for source in alone:
        run = runs.get(source.files)
        main = _read(source, run, None if run is None else run.folder)
        if run is None:
            yield main
            continue
        files = [(part.folder / STEPS, part) for part in run.others]
        parts = [_read(find([path])[0], part, run.folder) for path, part in files if path.is_file()]
        yield replace(
            main,
            findings=(*recorded(run), *main.findings, *(finding for part in parts for finding in part.findings)),
            points=main.points + sum(part.points for part in parts),
            error=next((part.error for part in (main, *parts) if part.error is not None), None),
            run=run,
        )


def _read(source: Source, part: Run | None, run: Path | None) -> Read:
    """What was read before an error counts. `part`: the records of the same optimizer, if nanproof wrote the log; `run`: the
    folder of the whole run."""
    import zlib

    from nanproof.logs._points import Point
    from nanproof.logs._story import Story
    from nanproof.logs.judge._findings import judge
    from nanproof.logs.read._sources import read
    from nanproof.report._findings import inferred

    story, taken, error = Story(), Story(), None
    own = source.format == "nanproof"
    try:
        for item in read(source):
            story.add(item)
            if own and not (isinstance(item, Point) and item.refused):
                taken.add(item)
    except (OSError, EOFError, ValueError, zlib.error, NanproofError) as failed:
        error = f"{type(failed).__name__}: {failed}" if not isinstance(failed, NanproofError) else str(failed)
    findings = inferred(story, taken, part, run or Path(source.path).parent) if own else judge(story)
    return Read(source.path, source.format, story, findings, error, points=story.points)


def show(console: Console, read: Sequence[Read]) -> None:
    """Print a table where there are several, then each unhealthy log in full."""
    if len(read) > 1:
        _overview(console, read)
    for each in read:
        if len(read) == 1 or each.findings or each.error:
            _print_one(console, each)


def _overview(console: Console, read: Sequence[Read]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("log", overflow="fold")
    table.add_column("format", overflow="fold")
    table.add_column("points", justify="right")
    table.add_column("found", overflow="fold")
    for each in read:
        worst = each.worst
        found = "too few to judge" if each.status == "healthy" and not each.judged else each.status
        found = f"{worst.severity}: {worst.kind}, {worst.place}" if worst else found
        cells = (each.path, each.format, str(each.points), found)
        table.add_row(*(Text(_safe(console, cell), style=style) for cell, style in zip(cells, _styles(each), strict=True)))
    console.print(table)


def _styles(each: Read) -> tuple[str, str, str, str]:
    return "", "", "", COLOURS.get(each.status, "")


def _print_one(console: Console, each: Read) -> None:
    from rich.text import Text

    story = each.story
    last = story.segments[-1].last
    steps = f", to step {_number(last.step)}" if last is not None and last.step is not None else ""
    runs = f", {len(story.segments) + story.dropped} runs" if len(story.segments) > 1 else ""
    about = f" ({each.format}): " if each.format else ": "
    if each.error is not None:
        _say(console, f"{each.path}{about}could not be read{' to its end' if story.points else ''}: {each.error}", "bold red")
    if each.error is None or each.points:
        points = f"{each.points} point{'s' * (each.points != 1)}{steps}{runs}{_recorded(each)}"
        if each.findings:
            _say(console, f"{each.path}{about}{points}", "bold")
        elif each.judged:
            _say(console, f"{each.path}{about}no sign of trouble in {points}", "bold")
        elif each.points:
            several = "no single loss" if any("loss" in name.lower() for name in each.parts) else "no loss"
            few = "too few to judge the curve" if "loss" in each.names else f"{several}, so there is no curve to judge"
            finite = "" if each.nonfinite else " No value of training is NaN or Inf."
            _say(console, f"{each.path}{about}{points}: {few}.{finite}", "bold")
        else:
            empty = os.path.isfile(each.path) and os.path.getsize(each.path) == 0
            _say(console, f"{each.path}{about}{'the file is empty' if empty else 'no loss or gradient norm found'}", "bold")
            if each.path.lower().endswith(CHECKPOINTS):
                _say(
                    console,
                    f"this is a checkpoint, not a log. To look for NaN in its weights: nanproof scan {each.path}",
                    indent=2,
                )
    _say_which_loss(console, each)
    for line in _pictures(each, min(console.width, WIDEST), console.options.ascii_only):
        console.print(Text(line), overflow="crop", no_wrap=True)
    for finding in each.findings:
        _print_finding(console, finding)


def _say_which_loss(console: Console, each: Read) -> None:
    """Print which of several losses is judged as the loss, and why."""
    from nanproof.logs.text._names import why

    losses = [name for name in each.parts if "loss" in name.lower()]
    if "loss" in each.names and losses and each.run is None:
        name = each.names["loss"]
        others = ", ".join(losses[:4]) + (", ..." if len(losses) > 4 else "")
        _say(console, f"loss: {name} ({why(name)}). Also checked for NaN and Inf: {others}", indent=2)


def _recorded(each: Read) -> str:
    """What nanproof recorded of its own run, in a few words."""
    if each.run is None:
        return ""
    from nanproof.report._findings import account

    kept = account(each.run)
    several = [f"{len(kept['optimizers'])} optimizers"] if kept["optimizers"] else []
    counts = [f"{kept['incidents']} incident{'s' * (kept['incidents'] != 1)}", f"{kept['refused']} refused"]
    state = kept["state"] if kept["halted"] is None else f"halted at step {kept['halted']}"
    return f"; {', '.join([*several, *counts, state])}"


def _print_finding(console: Console, finding: Finding) -> None:
    from rich.text import Text

    console.print()
    kept = finding.recorded
    done = "" if kept is None else f", {kept.action}" + (f", {kept.count} times" if kept.count > 1 else "")
    console.print(Text(f"{finding.severity}: {finding.kind}{done}", style=COLOURS[finding.severity]))
    of = f" of {finding.optimizer}" if finding.optimizer else ""
    _say(console, f"{finding.headline}. First seen: {finding.place}{of}.", "bold", indent=2)
    _say(console, finding.said, indent=2)
    if kept is not None:
        where = f", {kept.where}" if kept.where and kept.where != kept.cause else ""
        where += f", {kept.source}" if kept.source else ""
        _say(console, f"cause: {kept.cause}{where}" if kept.cause is not None else "cause: not diagnosed", indent=2)
        if kept.fix:
            tried = "verified on the step itself" if kept.verified else "not verified"
            _say(console, f"fix, {tried}: {kept.fix}" if kept.cause != "unknown" else kept.fix, indent=2)
        if kept.bundle is not None:
            _say(console, f"bundle: {kept.bundle}", indent=2)
    likely = finding.causes if kept is None else ()
    if likely:
        _say(console, "likely causes", "bold", indent=2)
    for cause in likely:
        _say(console, f"- {cause.slug}: {cause.reason}." if cause.slug else f"- {cause.reason}.", indent=4, hang=2)
    if finding.commands:
        _say(console, "next", "bold", indent=2)
    for command in finding.commands:
        _say(console, command, indent=4, hang=2)


def _say(console: Console, text: str, style: str = "", indent: int = 0, hang: int = 0) -> None:
    """Words broken at the width of the terminal; all lines but the first are indented by `hang` more."""
    from rich.text import Text

    width = max(console.width - indent - hang, 20)
    for i, line in enumerate(Text(_safe(console, text), style=style).wrap(console, width, overflow="fold")):
        line.rstrip()
        console.print(Text(" " * (indent + hang * (i > 0))) + line, no_wrap=True, overflow="ignore", crop=False)


def _safe(console: Console, text: str) -> str:
    """Escape control characters of a log, and what the terminal cannot show."""
    return printable(text).encode(console.encoding, "backslashreplace").decode(console.encoding)


def _pictures(each: Read, width: int, ascii_only: bool) -> list[str]:
    """The loss, and the gradient norm in a line; in a healthy log one line. A few points are told, not drawn. Of several
    optimizers the first is drawn."""
    if each.story.points < FEW:
        return []
    drawn = "" if each.run is None else each.run.optimizer
    placed = (f for f in each.findings if (f.place.line or f.place.order or f.recorded) and f.optimizer == drawn)
    marked = min(placed, key=lambda f: f.place.step or 0, default=None) if each.run is not None else next(placed, None)
    loss = each.story.segments[-1].track("loss")
    flat = len(each.story.segments) == 1 and loss.low == loss.high
    lines = _picture(each, "loss", width, 5 if marked and not flat else 1, ascii_only, marked)
    if marked:
        lines += _picture(each, "grad_norm", width, 1, ascii_only, None, below=True)
    return lines


def _picture(
    each: Read, name: str, width: int, height: int, ascii_only: bool, marked: Finding | None, below: bool = False
) -> list[str]:
    from nanproof.watch._plot import ASCII, FINE, Scale, curve

    buckets = [b for segment in each.story.segments for b in segment.track(name).curve.buckets]
    if len(buckets) < 3 or width < 24:
        return []
    values = [b.shown for b in buckets]
    if name == "loss" and any(f.kind == "hidden-nan" for f in each.findings):
        values = [math.nan if value == 0 else value for value in values]
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return []
    low, high = min(finite), max(finite)
    scale = ""
    if low > 0 and high > 50 * low:
        values, scale = [math.log10(v) if math.isfinite(v) else v for v in values], ", log scale"
        low, high = math.log10(low), math.log10(high)
    ends = [_number(10**v if scale else v) for v in (low, high)]
    caption = f"{name} {ends[0]} to {ends[1]}{scale}"
    beside = height == 1 and width >= len(caption) + 24
    if below and len(values) > width - len(caption) - 4:
        beside = False  # in line with the curve above
    columns = min(width - 2 - (len(caption) + 2) * beside, max(len(values), 24))
    shown = Scale(low, high if high > low else low + max(abs(low), 1e-9), log=False)
    rows = curve(values, columns, height, shown, ASCII if ascii_only else FINE)
    if beside:
        return [f"  {rows[0]}  {caption}"]
    lines = [f"  {row}" for row in rows]
    if marked is not None:
        place = marked.place
        after = [i for i, b in enumerate(buckets) if (b.place.line >= place.line if place.line else _reached(b.place, place))]
        at = after[0] if after else len(buckets) - 1
        column = min(at * columns // len(values), columns - 1)
        said = f"^ {marked.place}"
        lines.append(
            "  "
            + (" " * column + said if column + len(said) <= width - 2 else " " * max(column - len(said) + 1, 0) + said[2:] + " ^")
        )
    return [*lines, f"  {caption}"]


def _reached(place: Place, other: Place) -> bool:
    """Whether a place of the log is at the step of another, or beyond."""
    return place.step is not None and other.step is not None and place.step >= other.step


def _number(value: float) -> str:
    from nanproof.logs._curve import number

    return number(value)
