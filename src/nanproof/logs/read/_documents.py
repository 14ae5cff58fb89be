"""Logs that are one JSON document: `trainer_state.json` of transformers, a list of dictionaries, or a dictionary of lists.

Records are decoded one after another from a sliding piece of text, so a document of any size needs little memory.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from nanproof._access import parse_json
from nanproof._errors import UsageError
from nanproof.logs._points import Item, Point, Sign
from nanproof.logs.read._files import BLOCK
from nanproof.logs.text._names import Collector, meaning, number
from nanproof.logs.text._text import TextReader

SMALL = 16 << 20
"""A document up to this size is decoded at once."""
LARGEST_RECORD = 16 << 20
LARGEST_NOTEBOOK = 64 << 20
MOST_NAMES, MOST_COLUMNS = 10_000, 100
"""Lists of a dictionary whose names are looked at closely, and those with names that are known."""
_LIKELY = re.compile(r"loss|xent|entrop|norm|l[\W_]*r|rate|scal|skip|iter|step|update|batch|e[\W_]*p", re.I)
"""Every name that has a meaning has one of these in it."""
MOST_USELESS = 1_000_000
"""Consecutive items of a list that are not records. A list with more of them is not a log."""
_CELL = re.compile(r"</t[dh]>\s{0,99}")
_TAG = re.compile(r"<[^<>]{0,2000}>")
_SETTINGS = {
    "max_steps": "steps",
    "logging_steps": "logging_steps",
    "num_train_epochs": "epochs",
}
_SETTING = re.compile(r'"(max_steps|logging_steps|num_train_epochs)"\s*:\s*([\d.eE+-]+)')
_START = re.compile(r"[\s,]*")


def json_document(stream: io.BufferedReader, tail: bytes = b"") -> Iterator[Item]:
    """Read a document, or a piece that was cut out of one. `tail` is the end of the file where that is known: transformers writes
    what was planned after what was logged."""
    start = stream.read(SMALL)
    if len(start) < SMALL:
        try:
            data = parse_json(start.decode("utf-8-sig", "replace"))
        except ValueError:
            pass  # cut short: what is whole in it counts
        else:
            yield from _of_value(data)
            return
    text = start.decode("utf-8-sig", "replace")
    if not _list_at(text):
        yield from _piece(start)
        return
    settings = _settings(text[:BLOCK]) | _settings(tail.decode("utf-8", "replace"))
    if '"log_history"' in text[:BLOCK]:
        yield Sign("transformers")
    names = Collector()
    for index, record in enumerate(_records(text, stream), 1):
        point = names.of_mapping(record, index)
        if point is not None:
            yield replace(point, settings=settings) if settings else point


def notebook(stream: io.BufferedReader) -> Iterator[bytes]:
    """What the cells of a Jupyter notebook printed. A table that a callback drew is a row a line, with tabs."""
    text = stream.read(LARGEST_NOTEBOOK)
    try:
        cells = parse_json(text.decode("utf-8-sig", "replace"))["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", ())]
        said = [
            output.get("text") or output.get("data", {}).get("text/html") or output.get("traceback") or "" for output in outputs
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError("this notebook is not whole, or has more than 64 MiB: save what it printed as text") from error
    block, size = [], 0
    for piece in said:
        lines = [piece] if isinstance(piece, str) else piece if isinstance(piece, list) else []
        printed = "".join(line for line in lines if isinstance(line, str))
        if "<td" in printed:
            joined = "".join(line.strip() for line in printed.split("\n"))
            printed = _TAG.sub("", _CELL.sub("\t", joined).replace("\t</tr>", "\n"))
        block.append(printed + "\n")
        size += len(printed)
        if size > BLOCK:
            yield "".join(block).encode("utf-8", "replace")
            block, size = [], 0
    yield "".join(block).encode("utf-8", "replace")


def _of_value(data: Any) -> Iterator[Point | Sign]:
    settings: dict[str, float] = {}
    if isinstance(data, dict) and "log_history" not in data:
        data = _transposed(data)
    elif isinstance(data, dict):
        told = {_SETTINGS[key]: number(data.get(key)) for key in _SETTINGS}
        settings = {key: value for key, value in told.items() if value is not None and value > 0}
        data = data["log_history"]
        yield Sign("transformers")
    names = Collector()
    for index, record in enumerate(data if isinstance(data, list) else (), 1):
        point = names.of_mapping(record, index) if isinstance(record, Mapping) else None
        if point is not None:
            yield replace(point, settings=settings) if settings else point


def _transposed(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`{"loss": [2.1, 2.0], "val_loss": [...]}`, as Keras keeps its history."""
    lists = ((key, value) for key, value in data.items() if isinstance(value, list) and value and _LIKELY.search(key))
    columns = dict(islice(((key, value) for key, value in islice(lists, MOST_NAMES) if meaning(key) is not None), MOST_COLUMNS))
    if not columns:
        return [dict(data)]
    return [{key: value[i] for key, value in columns.items() if i < len(value)} for i in range(max(map(len, columns.values())))]


def _settings(text: str) -> dict[str, float]:
    found = {}
    for name, value in _SETTING.findall(text):
        try:
            found[_SETTINGS[name]] = float(value)
        except ValueError:
            continue
    return {name: value for name, value in found.items() if value > 0}


def _list_at(text: str) -> int:
    """Return where the list of records begins: `log_history`, or the list that the document is. 0 if there is none."""
    at = text.find('"log_history"') if text.lstrip()[:1] == "{" else 0
    return text.find("[", at) + 1 if at >= 0 else 0


def _piece(start: bytes) -> Iterator[Item]:
    """Read records without the list around them, as people paste them: a name and a value on each line."""
    items = TextReader().read([start if start.endswith(b"\n") else start + b"\n"])
    first = next(items, None)
    if first is None:
        raise UsageError(
            "this JSON document has no list of records that a reader knows: give the log_history of a trainer_state.json, "
            "a list of dictionaries, or JSON lines"
        )
    yield first
    yield from items


def _records(text: str, stream: io.BufferedReader) -> Iterator[dict[str, Any]]:
    """The dictionaries of the list."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    decode = json.JSONDecoder().raw_decode
    at = _list_at(text)
    useless = 0
    while useless < MOST_USELESS:
        start = _START.match(text, at)
        at = start.end() if start is not None else at
        if text[at : at + 1] == "]":
            return
        try:
            record, at = decode(text, at) if at < len(text) else (None, at)
        except (ValueError, RecursionError):
            record = None
        if isinstance(record, dict) and record:
            useless = 0
            yield record
            continue
        if record is not None:
            useless += 1
            continue
        more = stream.read(BLOCK)
        if not more or len(text) - at > LARGEST_RECORD:
            return
        text, at = text[at:] + decoder.decode(more), 0
