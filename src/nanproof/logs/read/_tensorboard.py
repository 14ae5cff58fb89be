"""TensorBoard's event files, without TensorBoard: records with a length and checksums, and in each a message of scalars.

A record is length (8 bytes), checksum of the length (4), data, checksum of the data (4). The checksum of the length is verified:
it tells a damaged file at once. That of the data is not: in Python it would cost more than all the rest, and a message that is
damaged is left out when it cannot be decoded.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Iterator
from dataclasses import replace

from nanproof.logs._points import Point
from nanproof.logs.read._tables import merged
from nanproof.logs.read._wire import Damaged, doubles, fields, floats, signed
from nanproof.logs.text._names import Collector, meaning

LARGEST = 64 << 20
"""A record that says it is longer (a picture, a graph) is skipped."""


def _table() -> tuple[int, ...]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return tuple(table)


_CRC32C = _table()


def _masked(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _CRC32C[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def is_events(head: bytes) -> bool:
    return len(head) >= 12 and _masked(head[:8]) == int.from_bytes(head[8:12], "little")


def records(stream: io.BufferedReader) -> Iterator[bytes]:
    """The data of each record, up to where the file is cut short or damaged."""
    while True:
        start = stream.read(12)
        if not is_events(start):
            return
        length = int.from_bytes(start[:8], "little")
        if length > LARGEST:
            while length > 0 and (piece := stream.read(min(length, 1 << 20))):
                length -= len(piece)
            stream.read(4)
            continue
        data = stream.read(length)
        if len(data) < length:
            return
        yield data
        stream.read(4)


def points(events: Iterable[bytes]) -> Iterator[Point]:
    """Scalars of one step are separate events that follow each other: they are one point."""
    return merged(_points(events))


def _points(events: Iterable[bytes]) -> Iterator[Point]:
    names = Collector()
    epoch: tuple[int, float] | None = None
    for number, event in enumerate(events, 1):
        try:
            step, scalars = _scalars(event)
        except Damaged:
            continue
        pairs = [(found, value) for tag, value in scalars if (found := meaning(tag)) is not None and found.role != "step"]
        epoch = next(((step, value) for found, value in pairs if found.role == "epoch"), epoch)
        point = names.point(pairs, number)
        if point is not None:
            yield replace(point, step=float(step), epoch=epoch[1] if epoch is not None and epoch[0] == step else None)


def _scalars(event: bytes) -> tuple[int, list[tuple[str, float]]]:
    step = 0
    found = []
    for field, value in fields(event):
        if field == 2 and isinstance(value, int):
            step = signed(value)
        elif field == 5 and isinstance(value, bytes):
            for inner, entry in fields(value):
                if inner == 1 and isinstance(entry, bytes) and (scalar := _scalar(entry)) is not None:
                    found.append(scalar)
    return step, found


def _scalar(entry: bytes) -> tuple[str, float] | None:
    tag, scalar = "", None
    for field, value in fields(entry):
        if not isinstance(value, bytes):
            continue
        if field == 1:
            tag = value.decode("utf-8", "replace")
        elif field == 2 and len(value) == 4:
            scalar = struct.unpack("<f", value)[0]
        elif field == 8:
            scalar = _tensor(value)
    return None if scalar is None else (tag, scalar)


def _tensor(data: bytes) -> float | None:
    """The number in a tensor of one number."""
    dtype = 0
    values: tuple[float, ...] = ()
    for field, value in fields(data):
        if field == 1 and isinstance(value, int):
            dtype = value
        elif isinstance(value, bytes):
            if field == 4:
                values = {1: floats, 2: doubles}.get(dtype, lambda _: ())(value)
            elif field == 5:
                values = floats(value)
            elif field == 6:
                values = doubles(value)
    return values[0] if len(values) == 1 else None
