"""The list of runs and the list of what happened, laid out for any width. Text and styles only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size

from nanproof.watch._plot import Marks, Part, short, spark
from nanproof.watch._runs import Entry, View, step_of
from nanproof.watch._words import kind_of, said, summary, title

_STATES = {"running": "good", "halted": "refused", "stopped": "refused", "ended": "label", "unknown": "label", "waiting": "label"}


@dataclass(frozen=True, slots=True)
class Item:
    """One entry of a list."""

    key: object
    """Tells it from the others, so that the cursor stays on it when the list changes."""
    lines: tuple[list[Part], ...]


@dataclass(frozen=True, slots=True)
class _Column:
    heading: str
    cells: list[Part]
    rank: int
    """Narrow lists drop the highest first."""
    right: bool = True

    @property
    def width(self) -> int:
        return max([len(self.heading), *(len(text) for text, _ in self.cells)])


def runs_table(views: Sequence[View], columns: int, marks: Marks) -> tuple[list[Part], list[Item]]:
    """The headings, and a line for every run."""
    names = [said(view.name, marks.ascii) for view in views]
    found = [
        _Column("state", [(view.state, _STATES.get(view.state, "")) for view in views], 3, right=False),
        _Column("step", [("-" if view.step is None else str(view.step), "") for view in views], 1),
        _Column("loss", [(short(view.loss), "") for view in views], 2),
        _Column("steps/s", [(short(view.rate), "") for view in views], 6),
        _Column("refused", [(str(view.refused), "refused" if view.refused else "label") for view in views], 5),
        _Column("incidents", [(str(view.total_incidents), "incident" if view.total_incidents else "label") for view in views], 4),
    ]
    longest = max([3, *map(cell_len, names)])
    least = min(longest, max(columns // 3, 8))
    for _ in range(len(found)):
        if sum(column.width + 2 for column in found) + least <= columns:
            break
        found.remove(max(found, key=lambda column: column.rank))
    room = columns - sum(column.width + 2 for column in found)
    name_width = min(longest, room)
    left = room - name_width - 2
    curve_width = min(left, 40) if left >= 6 else 0
    heading: list[Part] = [("run".ljust(name_width), "label")]
    heading += [("  " + _placed(column.heading, column), "label") for column in found]
    items = []
    for i, view in enumerate(views):
        line: list[Part] = [(_cut(names[i], name_width, marks), "")]
        line += [("  " + _placed(column.cells[i][0], column), column.cells[i][1]) for column in found]
        loss = view.series.get("loss")
        if curve_width and loss and loss.mean:
            values = [float("nan") if bad > loss.width / 2 else mean for mean, bad in zip(loss.mean, loss.bad, strict=True)]
            line.append(("  " + spark(values, curve_width, marks), "line"))
        items.append(Item(view.folder, (line,)))
    return heading, items


def events_table(entries: Sequence[Entry], marks: Marks) -> list[Item]:
    """Two lines each: what, and why with the fix."""
    items = []
    seen: dict[object, int] = {}
    for entry in entries:
        event = entry.event
        kind = kind_of(event)
        head: list[Part] = [(f"{marks.events[kind]} ", kind), (said(title(entry), marks.ascii), "strong")]
        said_of_it = said(summary(entry), marks.ascii)
        key = (kind, step_of(event), event.kind, entry.optimizer)
        seen[key] = seen.get(key, 0) + 1
        items.append(Item((*key, seen[key]), (head, [("  " + said_of_it, "label")])))
    return items


def _placed(text: str, column: _Column) -> str:
    return text.rjust(column.width) if column.right else text.ljust(column.width)


def _cut(text: str, columns: int, marks: Marks) -> str:
    """The end of a name tells more than its beginning: runs/2026-11-15/lr-3e-4."""
    if cell_len(text) <= columns:
        return text + " " * (columns - cell_len(text))
    dots = ".." if marks.ascii else "…"
    while cell_len(text) > columns - len(dots):
        text = text[1:]
    return set_cell_size(dots + text, columns)
