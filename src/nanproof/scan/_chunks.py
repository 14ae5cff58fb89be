"""Where the numbers of a DCP checkpoint lie: each chunk of a tensor is a stretch of some file, read without loading it.

`.metadata` says in which file, and where, a chunk was put; there it is an archive of torch.save with one record of numbers.
"""

from __future__ import annotations

import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from nanproof._errors import NanproofError
from nanproof.scan._dcp import read_metadata
from nanproof.scan._formats import ZIP, Stored, check_zip, short_name
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
        except (NanproofError, OSError, ValueError, zipfile.BadZipFile) as error:
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
        raise UnreadableFile(f"it is packed ({', '.join(info.transform_descriptors)})")
    size = path.stat().st_size
    if info.offset + info.length > size:
        raise UnreadableFile(f"the file ends before it does ({size} bytes)")
    with open(path, "rb") as file:
        archive = zipfile.ZipFile(_Part(file, info.offset, info.length))
        check_zip(archive, path, info.length)
        records = [record for record in archive.infolist() if "/data/" in record.filename]
        order = next((record for record in archive.infolist() if record.filename.endswith("/byteorder")), None)
        wanted = sizes.numel() * dtype.itemsize
        little = order is None or order.file_size == 6  # "little" or "big"; read past zipfile, since checksums may be left out
        if order is not None and little:
            file.seek(_start(file, info, order, order.file_size))
            little = file.read(6) == b"little"
        if len(records) != 1 or records[0].file_size != wanted or not little:
            raise UnreadableFile(f"{wanted} bytes of numbers were expected")
        return FileSpan(path, _start(file, info, records[0], wanted), wanted, dtype)


def _start(file: Any, info: Any, record: zipfile.ZipInfo, size: int) -> int:
    """Where a record's bytes begin in the file: after its own header, which may be longer than the archive's list says."""
    file.seek(info.offset + record.header_offset)
    header = file.read(30)
    if not header.startswith(ZIP):
        raise UnreadableFile("its record lies outside of it")
    name, extra = struct.unpack("<HH", header[26:30])
    start: int = info.offset + record.header_offset + 30 + name + extra
    if start + size > info.offset + info.length:
        raise UnreadableFile("its record lies outside of it")
    return start


class _Part:
    """A stretch of an open file, as a file that zipfile can read."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = max(0, offset + (0, self._at, self._length)[whence])
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._offset + self._at)
        data: bytes = self._file.read(left if size < 0 else min(size, left))
        self._at += len(data)
        return data
