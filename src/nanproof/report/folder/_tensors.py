"""A safetensors file read without torch: its header, and the numbers of one row. Only the bytes that are asked for are read.

The file is eight bytes with the length of a header, the header (JSON: dtype, shape and place of each tensor), and the data. It
may come from anywhere, so that every length is compared with the file before it is believed.
"""

from __future__ import annotations

import math
import os
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from nanproof._access import open_regular, parse_json
from nanproof._errors import NanproofError
from nanproof.core.support._files import reason

MOST_HEADER = 16 << 20
MOST_NUMBERS = 1 << 16
"""Of a row, at most so many numbers are read."""
_ARRAYS = {"I64": "q", "I32": "i", "I16": "h", "I8": "b", "U8": "B", "U16": "H", "U32": "I", "U64": "Q", "F32": "f", "F64": "d"}
_BYTES = {**{name: array(code).itemsize for name, code in _ARRAYS.items()}, "BOOL": 1, "F16": 2, "BF16": 2}
INTEGERS = frozenset({"I64", "I32", "I16", "I8", "U8", "U16", "U32", "U64"})


class NotRead(NanproofError):
    """The file is not what its name says."""


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a tensor lies in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    """Byte of the file."""
    size: int


class Tensors:
    """The tensors of a file by name; none is read before it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open_regular(path) as file:
                whole = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                if whole < 8 or length > min(MOST_HEADER, whole - 8):
                    raise NotRead(f"{path.name} is not a safetensors file")
                header = parse_json(file.read(length))
        except OSError as error:
            raise NotRead(f"{path.name}: {reason(error)}") from error
        except ValueError as error:
            raise NotRead(f"{path.name} has no readable header") from error
        if not isinstance(header, dict):
            raise NotRead(f"{path.name} has no readable header")
        self.stored = {
            name: self._stored(name, told, 8 + length, whole) for name, told in header.items() if name != "__metadata__"
        }

    def row(self, name: str, index: int | None = None, start: int = 0, most: int = MOST_NUMBERS) -> Sequence[float]:
        """The numbers of `tensor[index]`, flat, from `start` on, at most `most` of them; of the whole tensor without an index."""
        stored = self.stored[name]
        if stored.dtype not in _BYTES:
            raise NotRead(f"{name}: numbers of {stored.dtype} are not read here")
        each = math.prod(stored.shape if index is None else stored.shape[1:])
        if index is not None and not (stored.shape and 0 <= index < stored.shape[0]):
            raise NotRead(f"{name} has no row {index}")
        count = max(0, min(each - start, most, MOST_NUMBERS))
        width = _BYTES[stored.dtype]
        place = stored.start + ((index or 0) * each + start) * width
        with open_regular(self.path) as file:
            file.seek(place)
            data = file.read(count * width)
        if len(data) != count * width:
            raise NotRead(f"{self.path.name} is shorter than it was")
        return _numbers(stored.dtype, data)

    def _stored(self, name: str, told: object, begin: int, whole: int) -> Stored:
        if isinstance(told, dict):
            dtype, shape, offsets = told.get("dtype"), told.get("shape"), told.get("data_offsets")
            if isinstance(dtype, str) and _counts(shape) and _counts(offsets) and len(offsets) == 2:
                start, end = offsets
                size = math.prod(shape) * _BYTES.get(dtype, 0)
                if start <= end <= whole - begin and (dtype not in _BYTES or end - start == size):
                    return Stored(dtype, tuple(shape), begin + start, end - start)
        raise NotRead(f"{self.path.name}: the place of {name[:80]!r} is not in the file")


def _counts(values: object) -> TypeGuard[list[int]]:
    return isinstance(values, list) and len(values) <= 64 and all(type(x) is int and 0 <= x < 1 << 48 for x in values)


def _numbers(dtype: str, data: bytes) -> Sequence[float]:
    if dtype == "BOOL":
        return [float(x != 0) for x in data]
    if dtype == "F16":
        return struct.unpack(f"<{len(data) // 2}e", data)
    if dtype == "BF16":  # the upper half of a float32
        values = array("f", b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2)))
    else:
        values = array(_ARRAYS[dtype], data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
