"""A diagnosis for a person: cause, place, evidence, fix. Used by every command that shows one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from nanproof.report.text import Row, rows

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Row", "grid", "rows"]


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
