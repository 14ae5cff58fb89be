"""Logs of one record a line: JSON lines, nanproof's own among them, and CSV."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from nanproof.logs._points import METRICS, Item, Point
from nanproof.logs.text._layouts import TRIES, Layout, Span
from nanproof.logs.text._names import Collector, Found, is_reward, lacks_loss, meaning, number
from nanproof.logs.text._text import TextReader
from nanproof.logs.text._values import ANY

MOST_TERMS = 100
"""Other values of one step that are put together."""
DELIMITERS = (",", "\t", ";", "|")
_PYTHON = re.compile(rb": (-?)(nan|inf)(?=[,}\s])")
_KEY = re.compile(rb'"(?:[^"\\]|\\.)*"\s*:')
_decode = json.JSONDecoder().decode
_NAME = re.compile(r"[A-Za-z_][\w ./()\[\]%@#-]{0,79}|")


def json_lines(blocks: Iterable[bytes]) -> Iterator[Item]:
    """Read whole lines. One that is not a JSON object is text: the traceback that ended the run may stand there. One that was cut
    short says nothing. Lines that have the keys of the one before are converted together, without being decoded."""
    names = Collector()
    others = TextReader()
    layout: Layout | None = None
    known: dict[str, int] = {}
    keys: list[str] = []
    line = made = 0
    for data in blocks:
        at = 0
        while at < len(data):
            if layout is not None and known == names.best and (found := layout.batch(data, at, line + 1)) is not None:
                batch, at = found
                line += len(batch)
                yield batch
                continue
            end = data.index(b"\n", at)
            text, at, line = data[at:end], end + 1, line + 1
            if not text or text.isspace():
                continue
            if text[:2] != b'{"' and (not text.lstrip().startswith(b"{") or text.lstrip().startswith(b"{'")):
                yield from others.feed(text + b"\n", line)
                continue
            record = _object(text)
            if record is None:
                continue
            own = "v" in record and "kind" in record  # nanproof's own
            if own and record["kind"] != "step":
                continue
            point = names.of_mapping(record, line)
            if point is not None:
                yield replace(point, refused=True) if own and record.get("action") == "skipped" else point
                if not own and made < TRIES and list(record) == keys:
                    layout, known, made = _layout(text, record, names, point), dict(names.best), made + 1
                keys = list(record)
    yield from others.finish()


def _layout(text: bytes, record: dict[str, Any], names: Collector, point: Point) -> Layout | None:
    """The pattern of a flat record: all keys as they are, and a number for each value that counts."""
    if point.loss_missing or len(text) > 4000 or any(isinstance(value, (dict, list)) for value in record.values()):
        return None
    fixed = [match.span() for match in _KEY.finditer(text)]
    spans = []
    for role, key in names.keys_of(record).items():
        places = list(re.finditer(re.escape(json.dumps(key).encode()) + rb"\s*:\s*\"?(" + ANY + rb")(?=[\",}\s])", text))
        if len(places) != 1:
            return None
        spans.append(Span(*places[0].span(1), role))
    return Layout(text, spans, fixed, point)


def _object(text: bytes) -> dict[str, Any] | None:
    if text.startswith((b'{"v":1,"kind":"step"', b'{"v":2,"kind":"step"', b'{"v":3,"kind":"step"')):
        cut = text.find(b',"typical":[')  # thousands of norms may follow, of which none is needed
        text = text[:cut] + b"}" if cut > 0 else text
    if b": nan" in text or b": inf" in text or b": -inf" in text:  # as Python prints them, which is not JSON
        text = _PYTHON.sub(lambda match: b": " + match[1] + (b"NaN" if match[2] == b"nan" else b"Infinity"), text)
    try:
        data = _decode(text.decode("utf-8", "replace"))
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
        if last is not None and point.step is not None and point.step == last.step and _apart(point, last):
            epoch = last.epoch if point.epoch is None else point.epoch
            terms, names = {**last.terms, **point.terms}, {**last.names, **point.names}
            values = {**last.values, **point.values}
            missing = last.loss_missing and not {"loss", "eval_loss"} & values.keys()
            last = replace(last, values=values, epoch=epoch, terms=terms, names=names, loss_missing=missing)
            continue
        if last is not None:
            yield last
        last = point
    if last is not None:
        yield last


def _apart(point: Point, last: Point) -> bool:
    """Whether two points have no value in common, and few enough to be one."""
    common = point.values.keys() & last.values.keys() or point.terms.keys() & last.terms.keys()
    return not common and len(last.terms) < MOST_TERMS


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
    settings = {"rewards": 1.0} if any(map(is_reward, header)) else {}
    names = Collector()
    for line, text in rows:
        cells = _cells(text, delimiter)
        count = len(cells)
        pairs = [(found, value) for i, found in columns if i < count and cells[i] and (value := number(cells[i])) is not None]
        point = names.point(pairs, line)
        if point is None:
            continue
        if lacks_loss(point) and any(found.role == "loss" for _, found in columns):
            point = replace(point, loss_missing=True)  # pandas writes NaN as an empty cell
        yield replace(point, settings=settings) if settings else point


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
        if len(names) >= 2 and all(_NAME.fullmatch(name) for name in names) and any(_is_metric(name) for name in names):
            return delimiter
    return None


def is_table(first: bytes, second: bytes) -> bool:
    """Whether the second line has numbers, or nothing, under the names that are known."""
    delimiter = delimiter_of(first)
    if delimiter is None:
        return False
    names, cells = _cells(first, delimiter), _cells(second, delimiter)
    under = [cell.strip() for name, cell in zip(names, cells, strict=False) if meaning(name.strip()) is not None]
    return len(cells) == len(names) and any(under) and all(not cell or number(cell) is not None for cell in under)


def _is_metric(name: str) -> bool:
    found = meaning(name)
    return found is not None and found.role in METRICS
