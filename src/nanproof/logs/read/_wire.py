"""The wire format of protocol buffers, as far as logs need it: fields of a message, one after another.

A message is (key, value) pairs. The key is a varint: field number times 8, plus 0 for a varint, 1 for 8 bytes, 2 for a length
and that many bytes, 5 for 4 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator


class Damaged(Exception):
    """These bytes are not a message."""


def varint(data: bytes, at: int) -> tuple[int, int]:
    """The number that starts here, and where it ends."""
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise Damaged
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return value, at
        shift += 7


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(field number, value): a number for varints, bytes for the rest."""
    at, size = 0, len(data)
    while at < size:
        key, at = varint(data, at)
        kind = key & 7
        if kind == 0:
            value, at = varint(data, at)
            yield key >> 3, value
            continue
        if kind == 2:
            length, at = varint(data, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise Damaged
        if at + length > size:
            raise Damaged
        yield key >> 3, data[at : at + length]
        at += length


def signed(value: int) -> int:
    """A varint of type int64: negative numbers have the highest of 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


def floats(data: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(data) // 4}f", data[: len(data) // 4 * 4])


def doubles(data: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(data) // 8}d", data[: len(data) // 8 * 8])
