"""What is said of a run, in rows and lines: the same words in the terminal, in plain lines and on the page."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from nanproof._records import Diagnosis, Forecast
from nanproof._text import printable
from nanproof._wording import repeated, rows
from nanproof.report.page._terms import IN_A_LINE, of_incident
from nanproof.watch._plot import Marks, short
from nanproof.watch._runs import Entry, Event, View, step_of

BAD = ("skipped", "salvaged", "healed", "rewound", "rolled-back", "halted")
"""Actions after which a step was not taken as it was."""
_LONGEST = 4000
"""Characters of a text that are shown."""


def said(text: object, ascii_only: bool = False) -> str:
    """Anything, on one line, without what would steer the terminal."""
    whole = str(text)
    line = printable(" ".join(whole[:_LONGEST].split())) + (" ..." if len(whole) > _LONGEST else "")
    return line.encode("ascii", "backslashreplace").decode() if ascii_only else line


def kind_of(event: Event) -> str:
    """Which mark it gets."""
    if isinstance(event, Forecast):
        return "forecast"
    return "refused" if event.action in BAD else "incident"


def marked(view: View) -> list[tuple[int, str]]:
    """(step, kind) of everything that gets a mark under the curves."""
    events = [entry.event for entry in (*view.incidents, *view.forecasts) if entry.optimizer == view.drawn]
    return [(step_of(event), kind_of(event)) for event in events] + [(back, "turn") for _, back in view.turns]


def title(entry: Entry) -> str:
    event, of = entry.event, f" of {entry.optimizer}" if entry.optimizer else ""
    if isinstance(event, Forecast):
        return f"step {event.step}{of}: {event.kind} ahead"
    return f"step {event.step}{of}: {event.kind}, {event.action}"


def summary(entry: Entry) -> str:
    """Cause and fix if they are known, else what was seen; then what was done, and how often it came again."""
    event, origin = entry.event, entry.origin
    if isinstance(event, Forecast):
        return str(event.message)
    again = repeated(event, entry.again)
    if event.diagnosis is not None and event.diagnosis.named:
        return _sentences(f"cause: {event.diagnosis.cause}", event.diagnosis.fix, event.outcome, again)
    if origin is not None and origin.diagnosis is not None and origin.diagnosis.named:
        done = replace(event, same_as=None).outcome
        return _sentences(f"as at step {origin.step}, cause: {origin.diagnosis.cause}", event.message, done, again)
    return _sentences(event.message, event.outcome, again)


def _sentences(*texts: str | None) -> str:
    return " ".join(f"{text.rstrip('. ')}." for text in texts if text)


def card(entry: Entry) -> list[tuple[str, str]]:
    """(heading, text) of all that is known."""
    event = entry.event
    found: list[tuple[str, Any]] = []
    if isinstance(event, Forecast):
        ahead = None if event.steps is None else f"in about {short(event.steps)} steps"
        margin = "" if event.margin is None else f", {short(event.margin)} more or less"
        found += [("seen", event.message), ("where", event.where), ("when", ahead and ahead + margin)]
        found += [("also", ", ".join(map(str, event.also)))]
    else:
        found += [("seen", event.message), ("done", event.outcome)]
        found += [("again", repeated(event, entry.again))]
        found += _rows(event.diagnosis or (entry.origin.diagnosis if entry.origin is not None else None))
        found += [
            ("loss", _number(event.loss)),
            ("terms", ", ".join(told_terms(of_incident(event)))),
            ("norm", _number(event.grad_norm)),
        ]
        found += [("rank", event.rank), ("micro-batch", event.micro_batch)]
        found += [("" if i else "gradients", f"{name}: {short(norm)}") for i, (name, norm) in enumerate(event.culprits[:8])]
        found += [("bundle", event.bundle)]
    return [(heading, str(text)) for heading, text in found if text not in (None, "")]


def _rows(found: Diagnosis | None) -> list[tuple[str, Any]]:
    """A diagnosis that someone else wrote may hold anything."""
    if found is None:
        return []
    try:
        return list(rows(found))
    except (TypeError, ValueError, AttributeError):
        return [("cause", found.cause), ("fix", found.fix)]


def _number(value: float | None) -> str | None:
    return None if value is None else short(value)


def told_terms(terms: Sequence[tuple[str, float]], most: int = IN_A_LINE) -> list[str]:
    """Name and value of the terms of a loss, and how many more there are."""
    more = [f"and {len(terms) - most} more"] if len(terms) > most else []
    return [f"{said(name[:40])} {short(x)}" for name, x in terms[:most]] + more


def status(view: View) -> list[str]:
    """Where it stands, most important first."""
    parts = [view.state]
    if view.step is None:
        return parts
    of = f" of {said(view.drawn)}" if view.drawn else ""
    parts += [f"step {view.step}{of}", f"loss {short(view.loss)}"]
    quiet = view.still()
    if quiet is not None:
        parts += [f"no step for {clock(quiet)}"]
    elif view.rate is not None:
        parts += [f"{short(view.rate)} steps/s"]
    parts += [f"{view.refused} refused"] if view.refused else []
    parts += [f"{view.total_incidents} incident{'s' * (view.total_incidents != 1)}"]
    parts += [f"{view.total_forecasts} ahead"] if view.total_forecasts else []
    parts += ["reading"] if view.catching_up else []
    return parts


def full_status(view: View) -> list[str]:
    """The same, and the newest value of each term of the loss."""
    return [*status(view), *told_terms(view.terms)]


def facts(view: View) -> list[tuple[str, str]]:
    """(heading, text) of what is known about a run."""
    found: list[tuple[str, Any]] = [
        ("folder", view.folder),
        ("state", view.state),
        *(("optimizer", told_optimizer(one)) for one in view.optimizers),
        ("steps", ", ".join(f"{number} {action}" for action, number in sorted(view.counts.items())[:12])),
        ("loss", _number(view.loss)),
        ("terms", ", ".join(told_terms(view.terms))),
        ("norm", _number(view.grad_norm)),
        ("lr", _number(view.lr)),
        ("scale", _number(view.scale)),
        ("rate", view.rate and f"{short(view.rate)} steps a second"),
        ("time", view.seconds and clock(view.seconds)),
        ("went back", ", ".join(f"from {a} to {b}" for a, b in view.turns[-8:])),
        ("missing", ", ".join(f"steps {a} to {b}: {why}" for a, b, why in view.gaps[-8:])),
        *_flat(view.about),
    ]
    return [(heading, str(text)) for heading, text in found if text not in (None, "", 0)]


def told_optimizer(one: Mapping[str, Any]) -> str:
    """An optimizer of several, in a line."""
    counts = f"{one['steps']} steps, {one['refused']} refused, {one['incidents']} incident{'s' * (one['incidents'] != 1)}"
    return f"{one['name']}: {one['state']}, {counts}"


def _flat(about: Any) -> list[tuple[str, str]]:
    """Facts of one level as they are, those of two as a list."""
    found = []
    for name, value in list(about.items())[:40]:
        if isinstance(value, dict):
            value = ", ".join(f"{key} {inner}" for key, inner in list(value.items())[:20])
        elif isinstance(value, list):
            value = ", ".join(map(str, value[:20]))
        found.append((str(name)[:20], str(value)[:400]))
    return found


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}"


def fitted(parts: Sequence[str], columns: int, between: str = "  ") -> str:
    """As many of the parts as there is room for."""
    line = ""
    for part in parts:
        longer = f"{line}{between}{part}" if line else part
        if len(longer) > columns and line:
            break
        line = longer
    return line[:columns]


def wrapped(found: Iterable[tuple[str, str]], columns: int, marks: Marks) -> list[tuple[str, str]]:
    """(heading, line): texts broken to fit beside their headings."""
    from rich.cells import chop_cells

    pairs = [(said(heading, marks.ascii), said(text, marks.ascii)) for heading, text in found]
    side = min(max((len(heading) for heading, _ in pairs), default=0) + 2, max(columns // 3, 4))
    lines: list[tuple[str, str]] = []
    for heading, text in pairs:
        rest = _words(text, max(columns - side, 8), chop_cells)
        lines += [((heading if i == 0 else "")[: side - 1].ljust(side), line) for i, line in enumerate(rest)]
    return lines


def _words(text: str, columns: int, chop: Any) -> list[str]:
    from rich.cells import cell_len

    lines, line = [], ""
    for word in text.split(" "):
        longer = f"{line} {word}" if line else word
        if cell_len(longer) <= columns:
            line = longer
            continue
        lines += [line] if line else []
        *whole, line = chop(word, columns) or [""]
        lines += whole
    return [*lines, line]
