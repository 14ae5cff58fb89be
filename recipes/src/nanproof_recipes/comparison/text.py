"""A comparison in words: how a value is written, the table as Markdown and for a terminal of any width, and the whole as text."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nanproof_recipes.comparison.comparison import Arm, Column, Comparison, Value
from nanproof_recipes.library import duration, escaped, fact, one_line

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult
    from rich.table import Table

DASH = "–"
ARM, ENDED = "arm", "ended"
GAP = 2
"""Spaces between the columns in a terminal."""
MOST_NAME, MOST_ENDING = 60, 40
"""Characters of a name and of an ending within a table."""
LEAST_ENDING = 10
"""Columns of a terminal below which an ending is not broken into lines."""


def cell(value: Value, column: Column) -> str:
    """A value as the column writes it, for people."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str) or column.form == "text":
        return one_line(value, 200) or DASH
    if not math.isfinite(value):
        return "nan" if value != value else "inf" if value > 0 else "-inf"
    if column.form == "seconds" and value >= 0:
        return duration(value)
    return f"{100 * value:.1f} %" if column.form == "share" else _number(value)


def is_bad(value: Value) -> bool:
    """Whether it is to be marked: not finite, also where that is told as a text."""
    if isinstance(value, str):
        return value.strip().lower().lstrip("+-") in ("nan", "inf", "infinity")
    return value is not None and not math.isfinite(value)


def is_numeric(column: Column) -> bool:
    return column.form != "text"


def rows(comparison: Comparison) -> Iterator[list[str]]:
    """Heads, then a row for each arm: name, values, ending."""
    yield [ARM, *(one_line(column.title, 80) for column in comparison.columns), ENDED]
    for arm in comparison.arms:
        values = [cell(arm.values.get(column.key), column) for column in comparison.columns]
        yield [one_line(arm.name, MOST_NAME), *values, ended(arm)]


def ended(arm: Arm) -> str:
    """How it ended, without the message of what it raised, which is told in full below a table."""
    return one_line(arm.ending.split(": ")[0], MOST_ENDING)


def facts_of(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Settings or environment as pairs of a name and a text, without those that say nothing."""
    pairs = [(one_line(key, 80).replace("_", " "), _fact(value)) for key, value in found.items()]
    return [(key, text) for key, text in pairs if text]


def markdown_table(comparison: Comparison) -> str:
    """A row an arm; numbers to the right. What is not finite is bold."""
    heads, *told = rows(comparison)
    sides = ["---", *("---:" if is_numeric(column) else "---" for column in comparison.columns), "---"]
    lines = [f"| {' | '.join(map(escaped, heads))} |", f"|{'|'.join(sides)}|"]
    for arm, row in zip(comparison.arms, told, strict=True):
        cells = [escaped(text) for text in row]
        for i, column in enumerate(comparison.columns, start=1):
            cells[i] = f"**{cells[i]}**" if is_bad(arm.values.get(column.key)) else cells[i]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def markdown(comparison: Comparison) -> str:
    """All that can be told without curves."""
    parts = [f"# {escaped(comparison.title, 200)}", escaped(comparison.lead, 4000)]
    if comparison.checks:
        said = [
            f"- {'Holds' if check.holds else '**Does not hold**'}: {_sentence(check.claim)} {escaped(check.measured, 1000)}"
            for check in comparison.checks
        ]
        parts += ["## What was to be shown", "\n".join(said)]
    parts += ["## Arms", markdown_table(comparison) if comparison.arms else "No arm was run."]
    if notes := [f"- {escaped(column.title)}: {escaped(column.note, 1000)}" for column in comparison.columns if column.note]:
        parts.append("\n".join(notes))
    for arm in comparison.arms:
        parts += [f"### {escaped(arm.name, MOST_NAME)}", f"{_sentence(arm.setting)} Ended: {_sentence(arm.ending)}"]
        if arm.story:
            parts.append("\n".join(f"- {escaped(said, 2000)}" for said in arm.story))
    for title, found in (("Settings", comparison.settings), ("Environment", comparison.environment)):
        if told := facts_of(found):
            lines = [f"| {escaped(key)} | {escaped(text, 2000)} |" for key, text in told]
            parts += [f"## {title}", "\n".join(["| | |", "|---|---|", *lines])]
    return "\n\n".join(part for part in parts if part) + "\n"


def terminal_table(comparison: Comparison) -> Table:
    """A table that looks at the width it is given: a row an arm, in as many pieces as it takes, each of which names the arms; one
    value below the other where there is no room for that."""
    from rich.table import Table

    widths = _widths(comparison)

    class Fitting(Table):
        """Drawn when the width is known."""

        def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
            pieces = _pieces(widths, options.max_width)
            if pieces is None:
                yield _narrow(comparison)
            for i, piece in enumerate(pieces or ()):
                if i:
                    yield ""
                yield _wide(comparison, piece, widths, options.max_width)

    return Fitting()


def _widths(comparison: Comparison) -> list[int]:
    """What each column takes at least. Heads are broken between words, values are not; an ending may take several lines."""
    heads, *told = rows(comparison)
    least = [
        max([_width(word) for word in head.split()] + [_width(row[i]) for row in told], default=0) for i, head in enumerate(heads)
    ]
    words = [_width(word) for row in told for word in row[-1].split()]
    return [*least[:-1], min(least[-1], max([LEAST_ENDING, *words]))]


def _pieces(widths: Sequence[int], room: int) -> list[list[int]] | None:
    """The columns of each piece, besides the first, which is in all; None where one does not fit. rich leaves a gap after the
    last column too."""
    found: list[list[int]] = [[]]
    left = room - widths[0] - GAP
    for i, width in enumerate(widths[1:], start=1):
        if left < GAP + width and found[-1]:
            found.append([])
            left = room - widths[0] - GAP
        if left < GAP + width:
            return None
        found[-1].append(i)
        left -= GAP + width
    return found


def _wide(comparison: Comparison, columns: Sequence[int], widths: Sequence[int], room: int) -> Table:
    """A row an arm: its name, and some of the columns. Where heads do not fit in one line each column has its least width: left
    to itself, rich breaks some heads, leaves others whole, and cuts the last columns off."""
    from rich.table import Table

    heads, *told = rows(comparison)
    shown, last = (0, *columns), len(heads) - 1
    whole = sum(max([_width(heads[i]), *(_width(row[i]) for row in told)]) + GAP for i in shown)
    left = room - sum(widths[i] + GAP for i in shown if i != last) - GAP
    most = {i: None if whole <= room else max(widths[i], left) if i == last else widths[i] or None for i in shown}
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for i in shown:
        right = 0 < i <= len(comparison.columns) and is_numeric(comparison.columns[i - 1])
        table.add_column(
            _styled(heads[i]),
            justify="right" if right else "left",
            min_width=widths[i] or None,
            max_width=most[i],
            overflow="fold",
        )
    for arm, row in zip(comparison.arms, told, strict=True):
        bad = [False, *(is_bad(arm.values.get(column.key)) for column in comparison.columns), False]
        table.add_row(*(_styled(row[i], "bold red" if bad[i] else "") for i in shown))
    return table


def _narrow(comparison: Comparison) -> Table:
    """Arm by arm: what was measured on the left, the value on the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), show_header=False)
    table.add_column(overflow="fold", ratio=None)
    table.add_column(overflow="fold")
    heads, *told = rows(comparison)
    for number, (arm, row) in enumerate(zip(comparison.arms, told, strict=True)):
        if number:
            table.add_row()
        table.add_row(_styled(ARM, "bold"), _styled(row[0], "bold"))
        for i, (head, text) in enumerate(zip(heads[1:], row[1:], strict=True)):
            wrong = i < len(comparison.columns) and is_bad(arm.values.get(comparison.columns[i].key))
            table.add_row(_styled(head), _styled(text, "bold red" if wrong else ""))
    return table


def _styled(text: str, style: str = "") -> Any:
    from rich.text import Text

    return Text(text, style=style)


def _width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def _number(x: float) -> str:
    """Four digits of it; whole numbers as they are."""
    if float(x).is_integer() and abs(x) < 1e15:
        return f"{x:,.0f}"
    return f"{x:,.0f}" if 1e4 <= abs(x) < 1e7 else f"{x:.4g}"


def _sentence(text: str) -> str:
    said = escaped(text, 1000)
    return said if not said or said[-1] in ".!?:" else f"{said}."


def _fact(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_fact(item) or str(item) for item in value)[:2000]
    return fact(value)
