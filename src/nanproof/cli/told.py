"""A diagnosis for a person: cause, place, evidence, fix. Used by every command that shows one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from nanproof.records import Diagnosis, few

if TYPE_CHECKING:
    from rich.console import RenderableType

Row = tuple[str, str | None]


def rows(diagnosis: Diagnosis) -> list[Row]:
    """(heading, text) of everything that is known; a text of None is left out."""
    found: list[Row] = [
        ("cause", f"{diagnosis.cause} (confidence {diagnosis.confidence:.2f})"),
        ("place", _place(diagnosis) or None),
        ("source", diagnosis.source),
    ]
    found += [("" if i else "evidence", f"- {said}") for i, said in enumerate(diagnosis.evidence)]
    found += [
        ("fix", diagnosis.fix),
        ("verified", "yes, on the step itself" if diagnosis.verified else "no"),
        ("or else", ", ".join(diagnosis.alternatives) or None),
    ]
    return found


def grid(found: Iterable[Row]) -> RenderableType:
    """The rows in two columns."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for heading, text in found:
        if text:
            table.add_row(heading, Text(text))
    return table


def _place(diagnosis: Diagnosis) -> str:
    parts = [diagnosis.phase, " in ".join(x for x in (diagnosis.op, diagnosis.where) if x)]
    for name, found in (("sample", diagnosis.samples), ("token", diagnosis.tokens)):
        parts.append(f"{name} {few(found, 8)}" if found else "")
    parts.append(f"rank {diagnosis.rank}" if diagnosis.rank is not None else "")
    return ", ".join(part for part in parts if part)
