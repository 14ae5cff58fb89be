"""`norms.bin`: the numbers of a step that a readable line has no room for, in checked binary blocks. No torch.

The file is a sequence of blocks, little-endian, each a head of 44 bytes and a payload:

    offset  size  field
         0     4  "NPB1"
         4     1  kind: 1 header, 2 step
         5     1  flags: 1 the step was refused, 2 it was a spike
         6     2  zero
         8     4  length of the payload
        12     4  id of the header that the block belongs to: the crc32 of that header's payload
        16     4  number of the block: larger than those of all blocks before it
        20     8  step (signed)
        28     8  time as in the step's line (float64; NaN if unknown)
        36     4  crc32 of the payload
        40     4  crc32 of the first 40 bytes

The payload of a header is zlib-compressed JSON: `{"names":[...],"sites":[...]}`. The payload of a step is columns up to its end:
a byte with the length of the name, the name, a byte with the code, four bytes with the length of the data, the data. Codes:
"l" 16 bits a number, logarithmic (see `decode_logs`); "f" float32, -1 for absent; "j" JSON.

A reader trusts no length: a block counts if both of its checksums are right. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import struct
import sys
import zlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, BinaryIO

from nanproof._access import parse_json

NORMS = "norms.bin"
ABSENT = -1.0
"""Stands for "this parameter had no gradient" among norms, which are never negative."""
HEADER, STEP = 1, 2
REFUSED, SPIKE = 1, 2

UNITS, LOWEST = 235, -150
"""Codes an octave, and the binary exponent of the smallest code."""
LAST, INF_CODE, NAN_CODE, ABSENT_CODE = 65532, 65533, 65534, 65535
"""The largest code of a finite number, and those of what is not one. Code 0 is exactly 0."""

LONGEST = 8 << 20
"""Bytes of a payload."""
MOST_NAMES = 200_000
"""Names of a header: a run with more has no blocks."""
_MAGIC = b"NPB1"
_HEAD = struct.Struct("<4sBBHIIIqdI")
_CRC = struct.Struct("<I")
SIZE = _HEAD.size + _CRC.size
_MOST_DAMAGED = 20
"""Damaged blocks after which the rest of a file is not read."""
MOST_TEXT = 4 << 20
"""Bytes of the names in a header."""
_MOST_JSON = 1 << 20
"""Bytes of a column of JSON."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block without what is in it."""

    kind: int
    flags: int
    header: int
    number: int
    step: int
    time: float | None
    offset: int
    """Where it begins in the file."""
    size: int
    """Bytes of head and payload."""

    @property
    def key(self) -> tuple[int, float | None]:
        """What its line has too: a run that goes back repeats its steps, at another time."""
        return self.step, self.time


def packed(
    kind: int, payload: bytes, *, header: int, number: int, step: int = 0, time: float | None = None, flags: int = 0
) -> bytes:
    """Return a block."""
    moment = math.nan if time is None else time
    head = _HEAD.pack(_MAGIC, kind, flags, 0, len(payload), header, number & 0xFFFFFFFF, step, moment, zlib.crc32(payload))
    return head + _CRC.pack(zlib.crc32(head)) + payload


def packed_columns(columns: Iterable[tuple[str, str, bytes]]) -> bytes:
    """Return the payload of a step. Each column is a name, a code and its data."""
    parts = []
    for name, code, data in columns:
        key = name.encode()
        parts += [bytes((len(key),)), key, code.encode(), _CRC.pack(len(data)), data]
    return b"".join(parts)


def unpacked_columns(payload: bytes) -> dict[str, Any]:
    """Return the columns of a step by name: an array of numbers, or what the JSON of one holds. Raises ValueError for a payload
    that is not made of columns."""
    found: dict[str, Any] = {}
    at = 0
    while at < len(payload):
        start = at + 1 + payload[at]
        end = start + 5
        if end > len(payload):
            raise ValueError("a column is cut short")
        name, code = payload[at + 1 : start].decode("ascii"), payload[start : start + 1]
        at = end + _CRC.unpack_from(payload, start + 1)[0]
        if at > len(payload) or name in found:
            raise ValueError("a column is cut short, or there twice")
        data = payload[end:at]
        if code == b"l":
            found[name] = decode_logs(data)
        elif code == b"f":
            found[name] = array("d", _words("f", data))
        elif code == b"j" and len(data) <= _MOST_JSON:
            found[name] = parse_json(data)
    return found


def decode_logs(data: bytes) -> array[float]:
    """Return numbers from their 16-bit codes: 0 is 0; 65533 Inf, 65534 NaN, 65535 absent; any other code c is
    2 ** ((c - 1) / 235 - 150), which is within 0.15 % of the number from the smallest float32 to the largest."""
    return array("d", map(_table().__getitem__, _words("H", data)))


@lru_cache(maxsize=1)
def _table() -> array[float]:
    values = [0.0, *(2.0 ** ((code - 1) / UNITS + LOWEST) for code in range(1, LAST + 1)), math.inf, math.nan, ABSENT]
    return array("d", values)


def _words(kind: str, data: bytes) -> array[Any]:
    """Little-endian numbers; raises ValueError if there is a part of one."""
    words: array[Any] = array(kind)
    words.frombytes(data)
    if sys.byteorder == "big":
        words.byteswap()
    return words


class BlockReader:
    """Reads the blocks of an open file from an offset on, as far as they are whole. Counts what is damaged and passes it over."""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        """Where the next block begins; a block that is not whole yet is read from there the next time."""
        self.damaged = 0
        self._headers: dict[int, tuple[tuple[str, ...], tuple[str, ...]]] = {}
        self._text = 0

    def blocks(self, file: BinaryIO, most: int = sys.maxsize) -> Iterator[tuple[Block, bytes]]:
        """Blocks of steps and headers, with their payloads. Stops after about `most` bytes."""
        end = self.offset + most
        while self.offset < end and self.damaged < _MOST_DAMAGED:
            file.seek(self.offset)
            head = file.read(SIZE)
            if len(head) < SIZE:
                return
            magic, kind, flags, _, length, header, number, step, time, check = _HEAD.unpack_from(head)
            sound = magic == _MAGIC and length <= LONGEST and _CRC.unpack_from(head, _HEAD.size)[0] == zlib.crc32(head[:-4])
            payload = file.read(length) if sound else b""
            if sound and len(payload) < length:
                return
            if not sound or check != zlib.crc32(payload):
                self.damaged += 1
                self._seek(file)
                continue
            start, self.offset = self.offset, self.offset + SIZE + length
            if kind in (HEADER, STEP):
                moment = time if math.isfinite(time) else None
                yield Block(kind, flags, header, number, step, moment, start, SIZE + length), payload

    def _seek(self, file: BinaryIO) -> None:
        """Go to what may be the next block, not far away."""
        file.seek(self.offset + 1)
        found = file.read(LONGEST).find(_MAGIC)
        if found < 0:
            self.damaged = _MOST_DAMAGED
        else:
            self.offset += 1 + found

    def take_header(self, block: Block, payload: bytes) -> None:
        """Remember the names of a header. Damage is passed over: its steps then have no names."""
        if block.header in self._headers or self._text >= MOST_TEXT:  # of all headers together
            return
        try:
            text = zlib.decompressobj().decompress(payload, MOST_TEXT)
            self._text += len(text)
            if text.count(b"[") + text.count(b"{") > MOST_NAMES:
                raise ValueError("nested")
            data = parse_json(text)
            names, sites = tuple(data["names"]), tuple(data["sites"])
            if len(names) + len(sites) > MOST_NAMES or not all(isinstance(name, str) for name in (*names, *sites)):
                raise ValueError("not names")
        except (zlib.error, ValueError, KeyError, TypeError, RecursionError):
            self.damaged += 1
            return
        self._headers[block.header] = names, sites

    def names_of(self, block: Block) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return names and sites of a step. Raises KeyError if its header is not there."""
        return self._headers[block.header]


def packed_header(names: Sequence[str], sites: Sequence[str]) -> bytes:
    """Return the payload of a header; nothing for more names than a reader takes."""
    text = json.dumps({"names": names, "sites": sites}, separators=(",", ":")).encode()
    return b"" if len(text) > MOST_TEXT or len(names) + len(sites) > MOST_NAMES else zlib.compress(text, 9)


# -- thinning --------------------------------------------------------------------------------------------------------------------


def stride(age: int, every: int, dense: int) -> int:
    """Return of how many ordinary steps one is kept, `age` steps before the newest: 1 for the newest `2 * dense` steps, 2 for as
    many before them as `2 * dense` again, then 4, 8, ..., and `every` at most. With `dense` 0 it is `every` for all."""
    if not dense:
        return every
    return min(every, 1 << (max(1, age // dense).bit_length() - 1))


def thinned(steps: Sequence[int], sizes: Sequence[int], marked: Sequence[bool], room: int, dense: int) -> tuple[list[bool], int]:
    """Choose the blocks that are kept, and return them with the `every` that was needed: the smallest power of two with which
    they fit into `room` bytes. A step is kept if its number is a multiple of its `stride`. Marked steps are kept, newest first,
    as far as they fit into half of the room; the rest of them count as ordinary."""
    newest = steps[-1] if steps else 0
    left, fixed = room // 2, [False] * len(steps)
    for i in range(len(steps) - 1, -1, -1):
        if marked[i] and sizes[i] <= left:
            fixed[i], left = True, left - sizes[i]
    kept: list[bool] = []
    for power in range(64):
        every = 1 << power
        kept = [fix or step % stride(abs(newest - step), every, dense) == 0 for step, fix in zip(steps, fixed, strict=True)]
        if sum(size for size, keep in zip(sizes, kept, strict=True) if keep) <= room:
            break
    return kept, every


def near(steps: Sequence[int], flags: Sequence[int], marks: Mapping[int, Any] | set[int], around: int) -> list[bool]:
    """Return which steps are marked: refused, a spike, at an incident, or so close to one of these in the file."""
    found = [False] * len(steps)
    for i, (step, flag) in enumerate(zip(steps, flags, strict=True)):
        if flag or step in marks:
            for j in range(max(0, i - around), min(len(steps), i + around + 1)):
                found[j] = True
    return found
