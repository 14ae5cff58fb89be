"""The manifest of a checkpoint that nanproof wrote: which files it consists of, with their sizes and checksums."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

from nanproof._errors import NanproofError

MANIFEST = "manifest.json"


class NotWhole(NanproofError):
    """A checkpoint is not what its manifest says."""


def crc32(path: Path) -> str:
    """Eight hexadecimal digits. Reads with a buffer of its own, so that a large file stays out of memory."""
    try:
        value, buffer = 0, bytearray(min(32 << 20, max(1, path.stat().st_size)))
        view = memoryview(buffer)
        with open(path, "rb", buffering=0) as file:
            while size := file.readinto(buffer):
                value = zlib.crc32(view[:size], value)
    except OSError as error:
        raise NotWhole(f"{path.name}: {error.strerror}") from error
    return f"{value:08x}"


def read_manifest(path: Path) -> dict[str, Any]:
    """Return the mapping in a JSON file. Raises `NotWhole` if there is none."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotWhole(f"{path.name}: {error.strerror}") from error
    except ValueError as error:
        raise NotWhole(f"{path.name} is damaged") from error
    if not isinstance(data, dict):
        raise NotWhole(f"{path.name} is damaged")
    return data
