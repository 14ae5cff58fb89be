"""Weights & Biases' `run-*.wandb` files, without wandb: LevelDB's log format around messages. History and console output count.

The file is blocks of 32 KiB. The first starts with 7 bytes (":W&B", a magic number, a version). A record is checksum (4 bytes),
length (2), type (1), data; one that does not fit into its block goes on in the next, and the type says which part it is.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from dataclasses import replace

from nanproof.logs._points import Note, Point
from nanproof.logs.read._wire import Damaged, fields, signed
from nanproof.logs.text._names import Collector
from nanproof.logs.text._text import TextReader

MAGIC = b":W&B"
_BLOCK = 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4
_HISTORY, _OUTPUT = 2, 13
"""Fields of a record: a line of history, and console output. Others are settings, summaries, statistics of the machine."""


def points(stream: io.BufferedReader) -> Iterator[Point | Note]:
    names = Collector()
    console = {0: _Console(), 1: _Console()}  # errors and output
    for number, record in enumerate(_records(stream), 1):
        try:
            for field, value in fields(record):
                if field == _HISTORY and isinstance(value, bytes):
                    point = names.of_mapping(_row(value), number)
                    if point is not None:
                        yield point
                elif field == _OUTPUT and isinstance(value, bytes):
                    parts = dict(fields(value))
                    text = parts.get(3)
                    yield from console[parts.get(1) == 1].notes(text, number) if isinstance(text, bytes) else ()
        except Damaged:
            continue


class _Console:
    """What the program printed, in pieces. Only notes are taken from it: what it logged is history."""

    def __init__(self) -> None:
        self._reader = TextReader()
        self._rest = b""

    def notes(self, piece: bytes, number: int) -> Iterator[Note]:
        text = self._rest + piece
        cut = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1
        self._rest = text[cut:][:_BLOCK]
        for item in self._reader.feed(text[:cut], number):
            if isinstance(item, Note):
                yield replace(item, line=number)


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
            elif kind == _MIDDLE and parts and len(parts) < 1024:
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
