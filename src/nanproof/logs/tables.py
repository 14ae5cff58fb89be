"""Logs of one record a line: JSON lines, nanproof's own among them, and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from nanproof.logs.names import Collector, Found, meaning, number
from nanproof.logs.points import Point

DELIMITERS = (",", "\t", ";", "|")


def json_lines(lines: Iterable[tuple[int, bytes]]) -> Iterator[Point]:
    """A line that is no JSON object, such as one cut short by a kill, is left out."""
    names = Collector()
    skipped = 0
    for line, text in lines:
        data = _object(text)
        if data is None:
            continue
        if data.get("kind") == "step" and "action" in data:
            skipped += data["action"] == "skipped"
            point = names.of_mapping({**data, "skipped": skipped}, line)
        elif "v" in data and "kind" in data and "norms" not in data and "names" in data:
            continue  # a header of nanproof
        else:
            point = names.of_mapping(data, line)
        if point is not None:
            yield point


def _object(text: bytes) -> dict[str, Any] | None:
    if text[:24].startswith(b'{"v":1,"kind":"step"'):
        cut = text.find(b',"typical":[')  # thousands of norms may follow, of which none is needed
        text = text[:cut] + b"}" if cut > 0 else text
    elif not text.lstrip().startswith(b"{"):
        return None
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def csv_rows(lines: Iterable[tuple[int, bytes]]) -> Iterator[Point]:
    """Lightning writes the loss and the learning rate of one step into two rows: they are one point."""
    return merged(_rows(lines))


def merged(points: Iterable[Point]) -> Iterator[Point]:
    """Points that follow each other with the same step and have no value in common are made one."""
    last: Point | None = None
    for point in points:
        if last is not None and point.step is not None and point.step == last.step and not point.values.keys() & last.values:
            epoch = last.epoch if point.epoch is None else point.epoch
            last = replace(last, values={**last.values, **point.values}, epoch=epoch)
            continue
        if last is not None:
            yield last
        last = point
    if last is not None:
        yield last


def _rows(lines: Iterable[tuple[int, bytes]]) -> Iterator[Point]:
    """The first line has the names. A cell that is empty was not logged."""
    rows = iter(lines)
    first = next(rows, None)
    if first is None:
        return
    delimiter = delimiter_of(first[1]) or ","
    header = _cells(first[1], delimiter)
    columns: list[tuple[int, Found]] = [
        (i, found) for i, name in enumerate(header) if (found := meaning(name.strip())) is not None
    ]
    names = Collector()
    for line, text in rows:
        cells = _cells(text, delimiter)
        count = len(cells)
        pairs = [(found, value) for i, found in columns if i < count and cells[i] and (value := number(cells[i])) is not None]
        point = names.point(pairs, line)
        if point is not None:
            yield point


def _cells(text: bytes, delimiter: str) -> list[str]:
    said = text.decode("utf-8", "replace").rstrip("\r").replace("\x00", "")
    if '"' not in said:
        return said.split(delimiter)
    try:
        return next(csv.reader(io.StringIO(said), delimiter=delimiter), [])
    except csv.Error:
        return []


def delimiter_of(first: bytes) -> str | None:
    """The delimiter of a header, None if the line is none: it needs two names or more, one of them a metric's."""
    for delimiter in DELIMITERS:
        names = [name.strip() for name in _cells(first, delimiter)]
        plain = len(names) >= 2 and all(len(name) <= 80 and number(name) is None for name in names)
        if plain and any((meaning(name) or ("step", 0))[0] not in ("step", "epoch") for name in names):
            return delimiter
    return None
