"""Weights & Biases' `run-*.wandb` files, without wandb: LevelDB's log format around messages, of which those of history count.

The file is blocks of 32 KiB. The first starts with 7 bytes (":W&B", a magic number, a version). A record is checksum (4 bytes),
length (2), type (1), data; one that does not fit into its block goes on in the next, and the type says which part it is.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator

from nanproof.logs.names import Collector
from nanproof.logs.points import Point
from nanproof.logs.wire import Damaged, fields, signed

MAGIC = b":W&B"
_BLOCK = 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_HISTORY = 2
"""The field of a record that holds a line of history; the others are settings, console output, statistics of the machine."""


def points(stream: io.BufferedReader) -> Iterator[Point]:
    names = Collector()
    for number, record in enumerate(_records(stream), 1):
        try:
            history = next((value for field, value in fields(record) if field == _HISTORY), None)
            row = _row(history) if isinstance(history, bytes) else None
        except Damaged:
            continue
        point = names.of_mapping(row, number) if row else None
        if point is not None:
            yield point


def _records(stream: io.BufferedReader) -> Iterator[bytes]:
    """Up to where the file is cut short or damaged."""
    parts: list[bytes] = []
    first = True
    while block := stream.read(_BLOCK):
        at = 7 if first else 0
        first = False
        while at + 7 <= len(block):
            length, kind = int.from_bytes(block[at + 4 : at + 6], "little"), block[at + 6]
            data = block[at + 7 : at + 7 + length]
            at += 7 + length
            if kind == 0 or len(data) < length:
                break  # the rest of the block is padding, or was never written
            if kind == _FULL:
                yield data
            elif kind == _FIRST:
                parts = [data]
            elif kind == _MIDDLE and parts and len(parts) < 4096:
                parts.append(data)
            elif kind == _LAST and parts:
                yield b"".join([*parts, data])
                parts = []


def _row(history: bytes) -> dict[str, object]:
    row: dict[str, object] = {}
    for field, value in fields(history):
        if field == 1 and isinstance(value, bytes):
            name, text = _item(value)
            try:
                row[name] = json.loads(text)
            except (ValueError, RecursionError):
                continue
        elif field == 2 and isinstance(value, bytes):
            for inner, number in fields(value):
                if inner == 1 and isinstance(number, int):
                    row.setdefault("_step", signed(number))
    return row


def _item(item: bytes) -> tuple[str, bytes]:
    """(name, value as JSON). The name of a nested one is in parts."""
    name, nested, text = "", [], b""
    for field, value in fields(item):
        if isinstance(value, bytes):
            if field == 1:
                name = value.decode("utf-8", "replace")
            elif field == 2:
                nested.append(value.decode("utf-8", "replace"))
            elif field == 16:
                text = value
    return name or "/".join(nested), text
