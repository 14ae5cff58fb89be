"""What lies in a checkpoint's files: the name, type and place of every tensor, found without executing anything.

Each reader returns `Stored` tensors and raises `RefusedFile` for a file that is not what it says or could execute code, or
`UnreadableFile` for one that is damaged. No reader takes a size on trust: what a file declares must lie inside the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanproof._access import open_regular, parse_json
from nanproof._errors import NanproofError
from nanproof.scan._archives import ZIP
from nanproof.scan._inside import UnreadableFile, first_line
from nanproof.scan._measure import FileSpan, has_fractions
from nanproof.scan._pickles import DEEPEST
from nanproof.scan._torch_files import load_torch

MOST_HEADER = 24 << 20
"""Bytes, enough for 150,000 tensors in one file. The safetensors library allows 100 MB, of which JSON can make gigabytes."""
MOST_DIMENSIONS = 64
"""torch has no more."""
LONGEST_NAME = 1000
_SAFETENSORS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C64": torch.complex64,
    "C128": torch.complex128,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": getattr(torch, "float8_e8m0fnu", None),
}
_WHOLE = {"BOOL", "I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64", "F4", "F6_E2M3", "F6_E3M2"}
"""Types in which nothing can be NaN or infinite."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor of a checkpoint."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    where: Sequence[FileSpan] | Tensor | None
    """Its numbers; nothing where they are whole numbers, which cannot be bad."""


def read_file(path: Path) -> list[Stored]:
    """The tensors of one file, whatever its name ends in."""
    try:
        with open_regular(path) as file:
            start = file.read(9)
    except OSError as error:
        raise UnreadableFile(error.strerror or str(error)) from error
    if path.suffix == ".safetensors" or (start[8:9] == b"{" and not start.startswith(ZIP)):
        return read_safetensors(path)
    return read_torch(path)


def read_safetensors(path: Path) -> list[Stored]:
    from safetensors import safe_open

    try:
        with open_regular(path) as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > MOST_HEADER:
                raise UnreadableFile(f"no whole safetensors file (a header of {length} bytes)")
            header = parse_json(file.read(length), object_pairs_hook=_no_name_twice)
        with safe_open(str(path), framework="numpy"):  # the library's own checks: header, types, offsets, no gaps
            pass
    except NanproofError:
        raise
    except Exception as error:  # the library has an exception of its own, torch others
        raise UnreadableFile(f"no whole safetensors file ({first_line(error)})") from error
    header.pop("__metadata__", None)
    size = path.stat().st_size
    stored = []
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        kind, shape = entry["dtype"], tuple(entry["shape"])
        offset = 8 + length + begin
        if len(shape) > MOST_DIMENSIONS:
            raise UnreadableFile(f"{name!r} has {len(shape)} dimensions")
        if not 0 <= begin <= end <= size - 8 - length:
            raise UnreadableFile(f"{name!r} lies beyond the end of the file")
        dtype = _SAFETENSORS.get(kind)
        if dtype is None:
            if kind not in _WHOLE:
                raise UnreadableFile(f"{name!r} is of type {kind}, which this torch does not have")
            stored.append(Stored(name, kind, shape, None))
            continue
        stored.append(Stored(name, short_name(dtype), shape, (FileSpan(path, offset, end - begin, dtype),)))
    return sorted(stored, key=lambda s: s.where[0].offset if isinstance(s.where, tuple) else 0)


def _no_name_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise UnreadableFile("the header has a name twice")
    return made


def read_torch(path: Path) -> list[Stored]:
    """A file of torch.save, mapped into memory if it is of the zip format (torch 1.6 and later)."""
    return [in_memory(name, tensor) for name, tensor in named_tensors(load_torch(path, mmap=True))]


def named_tensors(value: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor in nested dictionaries, lists and tuples, by its way there: 'optimizer.state.0.exp_avg'.

    What is there in several places is looked into once: sixty lists of two can be a path for every atom of the universe.
    """
    waiting = [iter([(prefix, value)])]
    seen: set[int] = set()
    while waiting:
        if len(waiting) > DEEPEST:
            raise UnreadableFile(f"its values are nested more than {DEEPEST} deep")
        for way, inner in waiting[-1]:
            if isinstance(inner, Tensor):
                yield way or "(the file itself)", inner
            elif isinstance(inner, (dict, list, tuple)) and id(inner) not in seen:
                seen.add(id(inner))
                waiting.append(_inside(inner, way))
                break
        else:
            waiting.pop()


def _inside(value: dict[Any, Any] | list[Any] | tuple[Any, ...], way: str) -> Iterator[tuple[str, Any]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (f"{way}.{_key(key)}" if way else _key(key))[:LONGEST_NAME], inner


def _key(key: Any) -> str:
    """A key as a part of a name. One that is not text may be of any size, and take any time to print."""
    if isinstance(key, str):
        return key[:LONGEST_NAME]
    plain = key is None or isinstance(key, (bool, float)) or (isinstance(key, int) and key.bit_length() < 256)
    return str(key) if plain else f"({type(key).__name__})"


def in_memory(name: str, tensor: Tensor) -> Stored:
    """A tensor that is at hand, of any layout."""
    shape, dtype = tuple(tensor.shape), short_name(tensor.dtype)
    numbers: Tensor = getattr(tensor, "_local_tensor", tensor).detach()  # a DTensor's part of this rank
    if numbers.layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc):
        numbers = numbers._values() if numbers.layout == torch.sparse_coo else numbers.values()
    elif numbers.layout != torch.strided:
        numbers = numbers.to_dense()
    whole = not has_fractions(numbers.dtype) or numbers.is_meta
    return Stored(name, dtype, shape, None if whole else numbers)


def short_name(dtype: torch.dtype) -> str:
    """float32 rather than torch.float32."""
    return str(dtype).removeprefix("torch.")
