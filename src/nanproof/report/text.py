"""What was found, in words: a diagnosis as headings and texts, and names from strangers made harmless. For every command and for
what is shown of a run."""

from __future__ import annotations

from nanproof.records import Diagnosis
from nanproof.wording import few

Row = tuple[str, str | None]


def printable(text: str) -> str:
    """Names come from strangers: what would steer the terminal, turn the direction of writing round or not be seen is written as
    an escape instead."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def rows(diagnosis: Diagnosis) -> list[Row]:
    """(heading, text) of everything that is known; a text of None is left out."""
    found: list[Row] = [
        ("cause", f"{diagnosis.cause} (confidence {diagnosis.confidence:.2f})"),
        ("place", place(diagnosis) or None),
        ("source", diagnosis.source),
    ]
    found += [("" if i else "evidence", f"- {said}") for i, said in enumerate(diagnosis.evidence)]
    found += [
        ("fix", diagnosis.fix),
        ("verified", "yes, on the step itself" if diagnosis.verified else "no"),
        ("or else", ", ".join(diagnosis.alternatives) or None),
    ]
    return found


def place(diagnosis: Diagnosis) -> str:
    """Where it happened, in a few words."""
    parts = [diagnosis.phase, " in ".join(x for x in (diagnosis.op, diagnosis.where) if x)]
    for name, found in (("sample", diagnosis.samples), ("token", diagnosis.tokens)):
        parts.append(f"{name} {few(found, 8)}" if found else "")
    parts.append(f"rank {diagnosis.rank}" if diagnosis.rank is not None else "")
    return ", ".join(part for part in parts if part)
