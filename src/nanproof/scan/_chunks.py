"""Where the numbers of a DCP checkpoint lie: each chunk of a tensor is a stretch of some file, read without loading it.

`.metadata` says in which file, and where, a chunk was put; there it is an archive of torch.save with one record of numbers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from nanproof._access import open_regular
from nanproof._errors import NanproofError
from nanproof._text import one_line
from nanproof.scan._archives import records
from nanproof.scan._dcp import read_metadata
from nanproof.scan._formats import Stored, short_name
from nanproof.scan._inside import UnreadableFile
from nanproof.scan._measure import FileSpan, has_fractions


def read_dcp(folder: Path, problem: Callable[[Path, str], None]) -> list[Stored]:
    """The tensors of a DCP folder; what is wrong with single files is told to `problem`, and the rest is read."""
    metadata = read_metadata(folder)
    chunks: dict[str, list[FileSpan]] = {}
    told: set[Path] = set()
    for index, info in metadata.storage_data.items():
        path = folder / info.relative_path
        entry = metadata.state_dict_metadata.get(index.fqn)
        try:
            if not path.is_file():
                raise UnreadableFile("missing, though .metadata names it")
            if isinstance(entry, TensorStorageMetadata):
                sizes = _sizes_of(entry, index.offset)
                chunk = _chunk(path, info, entry.properties.dtype, sizes)
                chunks.setdefault(index.fqn, []).append(chunk)
        except (NanproofError, OSError, ValueError) as error:
            if path not in told:  # once a file is enough; what else is in it is still looked at
                problem(path, str(error) if not path.is_file() else f"{index.fqn!r} cannot be read from it: {error}")
            told.add(path)
    stored = []
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata) and name in chunks:
            dtype = entry.properties.dtype
            whole = not has_fractions(dtype)
            stored.append(Stored(name, short_name(dtype), tuple(entry.size), None if whole else tuple(chunks[name])))
    return stored


def _sizes_of(entry: TensorStorageMetadata, offset: torch.Size | None) -> torch.Size:
    for chunk in entry.chunks:
        if offset is None or chunk.offsets == offset:
            return chunk.sizes
    raise ValueError(".metadata has no chunk at that place")


def _chunk(path: Path, info: Any, dtype: torch.dtype, sizes: torch.Size) -> FileSpan:
    """Where the numbers of a chunk lie: it is a small archive of torch.save inside the file, with one record of numbers."""
    if getattr(info, "transform_descriptors", None):
        raise UnreadableFile(f"it is packed ({one_line(', '.join(info.transform_descriptors), 100)})")
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if info.offset + info.length > size:
            raise UnreadableFile(f"the file ends before it does ({size} bytes)")
        found = records(file, path, info.offset, info.length)
        numbers = [record for name, record in found.items() if "/data/" in name]
        order = next((record for name, record in found.items() if name.endswith("/byteorder")), None)
        wanted = sizes.numel() * dtype.itemsize
        little = True
        if order is not None:
            file.seek(order.start)
            little = file.read(order.size if order.size < 8 else 8) == b"little"
        if len(numbers) != 1 or numbers[0].size != wanted or not little:
            raise UnreadableFile(f"{wanted} bytes of numbers were expected")
        return FileSpan(path, numbers[0].start, wanted, dtype)
