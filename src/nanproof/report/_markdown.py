"""The report as text for an issue: what happened, why, on what, and how to run it again. Short enough for one, and without any
path of the writer's home folder.

What comes from files is escaped: a parameter called `<img ...>`, or a message with pipes and backticks, is only text.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from nanproof._records import encode
from nanproof._text import one_line
from nanproof._wording import place
from nanproof.report.folder._run import Brief, Run
from nanproof.report.folder._troubles import Trouble, troubles
from nanproof.report.page._cards import around, command, without_home
from nanproof.report.page._catalogue import sentences
from nanproof.report.page._contents import causes, facts, optimizers, recoveries, summary, title
from nanproof.report.page._terms import IN_A_LINE, of_incident

MOST = 60_000
"""Characters; GitHub takes 65,536."""
MOST_INCIDENTS = 8
AROUND = 5
"""Steps on either side of an incident."""
_SPECIAL = re.compile(r"([\\`*\[\]|~$]|(?<!\w)_|_(?!\w))")
"""What Markdown would act on in the middle of a line; an underscore between letters is none of it."""


def markdown(run: Run) -> str:
    """The whole text. Of the incidents there are as many as there is room for: the first of each cause and action."""
    first: dict[tuple[str, str, str], Trouble] = {}
    for trouble in troubles(run):
        name = trouble.part.optimizer, trouble.cause, trouble.first.action
        there = first.get(name)
        if there is None or (there.first.diagnosis is None and trouble.first.diagnosis is not None):
            first[name] = trouble
    head, tail = [f"# {plain(title(run), 120)}", plain(summary(run), 1500)], _rest(run)
    room = MOST - len("\n\n".join([*head, *tail])) - 200
    told: list[str] = []
    for trouble in list(first.values())[:MOST_INCIDENTS]:
        text = "\n\n".join(_incident(trouble))
        room -= len(text) + 2
        if room < 0:
            told.append("(more of them are in the run's folder)")
            break
        told.append(text)
    return "\n\n".join([*head, *told, *tail]) + "\n"


def _rest(run: Run) -> list[str]:
    """What is told of the run as a whole; well below a third of the room."""
    parts = []
    if run.others:
        heads = ["optimizer", "steps", "refused", "incidents", "last loss", "state"]
        rows = [
            [plain(one["name"], 120), *(str(one[key]) for key in ("steps", "refused", "incidents", "loss", "state"))]
            for one in optimizers(run)
        ]
        parts += ["## Optimizers", _table(heads, rows)]
    if run.total["incidents"] > 1:
        parts += [
            "## Incidents by cause",
            _table(["cause", "incidents"], [[plain(name, 100), f"{n:,}"] for name, n in causes(run)]),
        ]
    if coming := [forecast for part in run.parts for forecast in part.forecasts[-10:]]:
        rows = [[str(one.step), plain(one.kind), plain(one.message, 300)] for one in coming[:40]]
        parts += ["## Forecasts", _table(["step", "kind", "what was coming"], rows)]
    if went := recoveries(run)[-10:]:
        rows = [
            [str(one["step"]), "" if one["to"] is None else str(one["to"]), plain(one["how"]), plain(one["what"], 300)]
            for one in went
        ]
        parts += ["## Recoveries", _table(["step", "back to", "how", "what was done"], rows)]
    if told := facts(run):
        parts += ["## Environment", _table(["", ""], [[plain(name), plain(value, 1500)] for name, value in told])]
    return parts


def plain(text: str, most: int = 600) -> str:
    """Text that Markdown and HTML leave alone, on one line; nobody is notified and no issue is linked."""
    text = _SPECIAL.sub(r"\\\1", one_line(without_home(text[: 2 * most]), most))
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"(?<=[@#])(?=\w)", "<!-- -->", text)


def code(text: str, most: int = 400) -> str:
    """Text in a fixed width: between as many backticks as it takes."""
    text = one_line(without_home(text[: 2 * most]), most).replace("|", "\u00a6")
    fence = "`" * (max((len(run) for run in re.findall(r"`+", text)), default=0) + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`" if text else ""


def _incident(trouble: Trouble) -> list[str]:
    incident = trouble.first
    diagnosis = incident.diagnosis
    of = f" of {plain(trouble.part.optimizer, 120)}" if trouble.part.optimizer else ""
    parts = [
        f"## Step {incident.step}{of}: {plain(trouble.cause, 100)}",
        f"{incident.kind}, {incident.action}. {plain(incident.message, 1500)}",
    ]
    if incident.outcome:
        parts.append(f"What was done: {plain(incident.outcome, 1500)}")
    if more := trouble.again:
        parts.append(f"It happened again: {plain(more, 300)}")
    if terms := of_incident(incident):
        parts.append(_terms(terms))
    if diagnosis is not None:
        why = sentences().get(diagnosis.cause, "")
        how = "verified: the step was run again with it, and held" if diagnosis.verified else "not verified"
        rows = [
            ["cause", f"{plain(diagnosis.cause, 100)} (confidence {diagnosis.confidence:.2f}). {plain(why)}"],
            ["where", plain(place(diagnosis), 300)],
            ["source", code(diagnosis.source or "", 200)],
            ["fix", f"{plain(diagnosis.fix, 800)} ({how})" if diagnosis.fix else ""],
            ["or else", plain(", ".join(diagnosis.alternatives[:8]), 300)],
        ]
        parts.append(_table(["", ""], [row for row in rows if row[1]]))
        if diagnosis.evidence:
            parts.append("Evidence:\n\n" + "\n".join(f"- {plain(said, 600)}" for said in diagnosis.evidence[:10]))
    if incident.culprits:
        rows = [[code(name, 120), str(encode(norm))] for name, norm in incident.culprits[:8]]
        parts.append(_table(["parameter", "gradient norm"], rows))
    if steps := _around(trouble.part, incident.step):
        parts.append(steps)
    bundle = trouble.bundle
    if bundle is not None:
        parts.append("Run it again, with a function of yours that returns `model` and `loss_fn`, or `trainer`:")
        parts.append(f"```sh\n{_fenced(command(bundle))}\n```")
    return parts


def _terms(terms: Sequence[tuple[str, float]]) -> str:
    """The terms of the loss on one line; those that are not finite are bold, and first."""
    each = [f"{plain(name, 80)} {encode(x)}" for name, x in terms[:IN_A_LINE]]
    marked = [f"**{said}**" if not math.isfinite(x) else said for said, (_, x) in zip(each, terms, strict=False)]
    more = f" and {len(terms) - IN_A_LINE} more" if len(terms) > IN_A_LINE else ""
    return f"Terms: {', '.join(marked)}{more}"


def _around(run: Run, step: int) -> str:
    briefs = around(run, step, AROUND)
    heads = ["step", "loss", "gradient norm", "learning rate", "loss scale", "action"]
    return _table(heads, [_row(brief, brief.step == step, again) for brief, again in briefs]) if briefs else ""


def _row(brief: Brief, here: bool, again: bool) -> list[str]:
    values = [
        str(brief.step),
        *("" if x is None else str(encode(x)) for x in (brief.loss, brief.grad_norm, brief.lr, brief.scale)),
    ]
    values.append(plain(brief.action, 40) + (", again" if again else ""))
    return [f"**{x}**" if here and x else x for x in values]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _fenced(text: str) -> str:
    """On a line of its own within a block of code, which no line of it can end."""
    return one_line(text, 1000).replace("```", "` ` `")
