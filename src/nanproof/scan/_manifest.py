"""The manifest of a checkpoint that nanproof wrote: which files it consists of, with their sizes and checksums."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any

from nanproof._access import open_regular, read_json
from nanproof._errors import NanproofError

MANIFEST = "manifest.json"


class NotWhole(NanproofError):
    """A checkpoint is not what its manifest says."""


def crc32(path: Path) -> str:
    """Eight hexadecimal digits. Reads with a buffer of its own, so that a large file stays out of memory."""
    try:
        with open_regular(path) as file:
            value, buffer = 0, bytearray(min(32 << 20, max(1, os.fstat(file.fileno()).st_size)))
            view = memoryview(buffer)
            while size := file.readinto(buffer):  # type: ignore[attr-defined]
                value = zlib.crc32(view[:size], value)
    except OSError as error:
        raise NotWhole(f"{path.name}: {error.strerror}") from error
    return f"{value:08x}"


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file. Raises `NotWhole` if there is none."""
    try:
        data = read_json(path)
    except OSError as error:
        raise NotWhole(f"{path.name}: {error.strerror}") from error
    except ValueError as error:
        raise NotWhole(f"{path.name} is damaged") from error
    if not isinstance(data, dict):
        raise NotWhole(f"{path.name} is damaged")
    return data
