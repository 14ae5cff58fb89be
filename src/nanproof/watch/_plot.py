"""Curves in characters: a line, a band from lowest to highest, crosses where there is no number, and an axis of steps.

Braille characters hold 2 by 4 dots, so that a terminal of 80 columns shows about 140 points. Where they cannot be shown,
`ASCII` draws with commas and quotes. Everything here is text with the name of a style beside it; who shows it knows the colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Part = tuple[str, str]
"""Text, and what it is: "line", "band", "cross", "axis", "label", one of `ORDER`, or "" for nothing."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The characters of one kind of terminal."""

    ascii: bool
    columns: int
    """Dots beside each other in a character."""
    rows: int
    """Dots above each other."""
    cross: str
    corner: str
    side: str
    floor: str
    tick: str
    heavy: str
    """Of the list that keys go to: colours alone would not tell on every terminal."""
    events: dict[str, str]
    blocks: str
    """Nothing, eight heights, and a cross: for a curve in one line of text."""

    def glyph(self, dots: int) -> str:
        """The character of some dots: bit `row * columns + column`."""
        if self.ascii:
            return " ',:"[dots]
        return chr(0x2800 + sum(bit for place, bit in enumerate(_BRAILLE) if dots >> place & 1))


_BRAILLE = (0x01, 0x08, 0x02, 0x10, 0x04, 0x20, 0x40, 0x80)
_SHAPES = {"refused": "▲", "incident": "△", "forecast": "◇", "turn": "◂"}
FINE = Marks(False, 2, 4, "×", "└", "│", "─", "┴", "━", _SHAPES, " ▁▂▃▄▅▆▇█×")
ASCII = Marks(
    True, 1, 2, "x", "+", "|", "-", "+", "=", {"refused": "^", "incident": "!", "forecast": "?", "turn": "<"}, " ..::||##x"
)
ORDER = ("refused", "turn", "incident", "forecast")
"""Where two of them share a column, the first is shown."""


def marks_for(encoding: str | None, terminal: str = "") -> Marks:
    """What can be shown: `FINE` where all of it can be written. The console of Linux has no Braille in its font."""
    try:
        f"{FINE}\u28ff\u2190".encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return ASCII if terminal == "linux" else FINE


@dataclass(frozen=True, slots=True)
class Series:
    """One number over the steps, in buckets of `width` steps that begin at `steps`."""

    steps: Sequence[int]
    width: int
    low: Sequence[float]
    high: Sequence[float]
    mean: Sequence[float]
    bad: Sequence[int]
    """How many values of the bucket are NaN or Inf."""

    def within(self, start: float, end: float) -> range:
        """Buckets that have some of these steps."""
        first = next((i for i, step in enumerate(self.steps) if step + self.width > start), len(self.steps))
        last = next((i for i in range(len(self.steps), first, -1) if self.steps[i - 1] < end), first)
        return range(first, last)

    def finite(self, start: float, end: float) -> list[float]:
        found = (x for i in self.within(start, end) for x in (self.low[i], self.high[i]))
        return [x for x in found if math.isfinite(x)]


@dataclass(frozen=True, slots=True)
class Scale:
    """From a value to a share of the height."""

    bottom: float
    top: float
    log: bool

    def share(self, value: float) -> float:
        """0 at the bottom, 1 at the top; below 0 and above 1 are outside."""
        if not self.log:
            return (value - self.bottom) / (self.top - self.bottom)
        if value <= 0:
            return -1.0
        return math.log(value / self.bottom) / math.log(self.top / self.bottom)

    def at(self, share: float) -> float:
        if self.log:
            return self.bottom * math.exp(share * math.log(self.top / self.bottom))
        return self.bottom + share * (self.top - self.bottom)


def scale(values: Sequence[float], how: str = "auto") -> Scale | None:
    """What holds all of them. "auto" is logarithmic where they are positive and span a factor of 100. None without a value."""
    if not values:
        return None
    bottom, top = min(values), max(values)
    positive = [x for x in values if x > 0]
    spans = bottom > 0 and top / bottom > 100
    if positive and (how == "log" or (how == "auto" and spans)):
        bottom = min(positive)
        if top / bottom < 1.0001:
            bottom, top = bottom / 1.5, top * 1.5
        return Scale(bottom, top, True)
    if top - bottom <= 1e-9 * max(abs(top), abs(bottom), 1e-300):
        room = abs(top) * 0.5 or 1.0
        bottom, top = bottom - 0.9 * room, top + room  # not in the middle, where it would fall between two rows of dots
    return Scale(bottom, top, False)


def chart(series: Series, span: tuple[float, float], columns: int, rows: int, drawn: Scale, marks: Marks) -> list[list[Part]]:
    """Rows of text, highest first, each `columns` wide. A cross in the top row where a value is NaN or Inf."""
    wide, high = columns * marks.columns, rows * marks.rows
    line, band = [0] * (columns * rows), [0] * (columns * rows)

    def dot(where: list[int], x: int, y: int) -> None:
        if 0 <= x < wide and 0 <= y < high:
            across, down = x // marks.columns, (high - 1 - y) // marks.rows
            inside = (high - 1 - y) % marks.rows * marks.columns + x % marks.columns
            where[down * columns + across] |= 1 << inside

    def height(value: float) -> int:
        share = drawn.share(value)
        return round(share * (high - 1)) if -1e-9 <= share <= 1 + 1e-9 else -1 if share < 0 else high

    before: tuple[int, int] | None = None
    for x, low, top, mean in _points(series, span, wide):
        if mean is None:
            before = None
            continue
        y = height(mean)
        for between in range(max(height(low), 0), min(height(top), high - 1) + 1):
            if (between + x) % 2 == 0 and abs(between - y) >= marks.rows:  # nearer it would only fringe the line
                dot(band, x, between)
        for at, upto in _joined(before, (x, y)):
            dot(line, at, upto)
        before = x, y
    crossed = {int(x // marks.columns) for x in _bad(series, span, wide)}
    return [_row(line, band, crossed if row == 0 else set(), row, columns, marks) for row in range(rows)]


def _row(line: list[int], band: list[int], crossed: set[int], row: int, columns: int, marks: Marks) -> list[Part]:
    cells: list[Part] = []
    for x in range(columns):
        here = row * columns + x
        if x in crossed:
            cells.append((marks.cross, "cross"))
        elif line[here]:
            cells.append((marks.glyph(line[here]), "line"))
        elif band[here]:
            cells.append((marks.glyph(band[here]), "band"))
        else:
            cells.append((" ", ""))
    return merged(cells)


def _points(series: Series, span: tuple[float, float], wide: int) -> Iterator[tuple[int, float, float, float | None]]:
    """(column of dots, lowest, highest, mean) of the buckets; a mean of None where the line is broken."""
    group: list[int] = []
    at = 0
    for i in [*series.within(*span), -1]:
        x = -1 if i < 0 else _column(series.steps[i] + (series.width - 1) / 2, span, wide)
        if group and x != at:
            means = [series.mean[j] for j in group]
            yield at, min(series.low[j] for j in group), max(series.high[j] for j in group), sum(means) / len(means)
            group = []
        if i < 0:
            return
        at = x
        if math.isfinite(series.mean[i]):
            group.append(i)
        elif series.bad[i]:
            yield x, 0.0, 0.0, None


def _bad(series: Series, span: tuple[float, float], wide: int) -> Iterator[int]:
    for i in series.within(*span):
        if series.bad[i]:
            yield min(max(_column(series.steps[i] + (series.width - 1) / 2, span, wide), 0), wide - 1)


def _column(step: float, span: tuple[float, float], wide: int) -> int:
    return math.floor((step - span[0]) / max(span[1] - span[0], 1e-9) * wide)


def _joined(before: tuple[int, int] | None, now: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Dots from one point to the next, each touching the one before."""
    if before is None:
        yield now
        return
    (x0, y0), (x1, y1) = before, now
    count = max(x1 - x0, abs(y1 - y0), 1)
    for k in range(1, count + 1):
        yield x0 + round((x1 - x0) * k / count), y0 + round((y1 - y0) * k / count)


def axis(
    span: tuple[float, float], columns: int, events: Iterable[tuple[int, str]], marks: Marks
) -> tuple[list[Part], list[Part]]:
    """The line under the curves with a mark for every event, (step, kind), and the steps below it."""
    line: list[Part] = [(marks.floor, "axis")] * columns
    labels = [" "] * columns
    free = 0
    steps = _round_steps(span, max(columns // 12, 2))
    thousands = all(step % 1000 == 0 for step in steps)
    for step in steps:
        x = _column(step, span, columns)
        text = count(step) if thousands else str(step)
        start = min(max(x - len(text) // 2, 0), columns - len(text))
        if not 0 <= x < columns or start < free:
            continue
        line[x] = (marks.tick, "axis")
        labels[start : start + len(text)] = text
        free = start + len(text) + 1
    ranked = sorted(events, key=lambda event: -ORDER.index(event[1]))
    for step, kind in ranked:
        if span[0] <= step < span[1]:
            line[_column(step, span, columns)] = (marks.events[kind], kind)
    return merged(line), [("".join(labels), "label")]


def _round_steps(span: tuple[float, float], about: int) -> list[int]:
    """Round numbers in the span, about so many."""
    raw = max((span[1] - span[0]) / about, 1.0)
    power = 10 ** math.floor(math.log10(raw))
    every = int(next(power * m for m in (1, 2, 5, 10) if power * m >= raw - 1e-9))
    first = math.ceil(span[0] / every) * every
    return list(range(first, math.ceil(span[1]), every))


def merged(cells: Iterable[Part]) -> list[Part]:
    """Neighbours of one kind as one text."""
    found: list[Part] = []
    for text, kind in cells:
        if found and found[-1][1] == kind:
            found[-1] = (found[-1][0] + text, kind)
        else:
            found.append((text, kind))
    return found


def curve(values: Sequence[float], columns: int, rows: int, drawn: Scale, marks: Marks) -> list[str]:
    """Rows of text for one value a step, highest first; in one row as `spark` draws it."""
    if rows == 1:
        return [spark(values, columns, marks)]
    series = Series(range(len(values)), 1, values, values, values, [not math.isfinite(x) for x in values])
    return ["".join(text for text, _ in row) for row in chart(series, (0, len(values)), columns, rows, drawn, marks)]


def spark(values: Sequence[float], columns: int, marks: Marks) -> str:
    """A curve in one line of text. A column of which most is not finite is a cross."""
    finite = [x for x in values if math.isfinite(x)]
    if not values or columns <= 0:
        return " " * columns
    top, bottom = (max(finite), min(finite)) if finite else (0.0, 0.0)
    drawn = []
    for x in range(columns):
        first = x * len(values) // columns
        column = values[first : max((x + 1) * len(values) // columns, first + 1)]
        good = [y for y in column if math.isfinite(y)]
        if 2 * len(good) < len(column) or not good:
            drawn.append(marks.blocks[9])
        else:
            drawn.append(marks.blocks[1 + round(7 * (sum(good) / len(good) - bottom) / max(top - bottom, 1e-12))])
    return "".join(drawn)


def short(value: float | None) -> str:
    """A number in at most seven characters, or eight if it is negative."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "NaN" if value != value else "Inf" if value > 0 else "-Inf"
    size = abs(value)
    if 1e4 <= size < 1e6:
        return f"{value:.0f}"
    if size and (size < 1e-3 or size >= 1e6):
        mantissa, _, exponent = f"{value:.1e}".partition("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.4g}"


def count(number: int) -> str:
    """Thousands in few characters: 12k, 1.25M. All digits that count are there."""
    for unit, factor in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if abs(number) >= factor:
            return f"{number / factor:.12g}{unit}"
    return str(number)
