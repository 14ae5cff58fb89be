"""What makes a checkpoint whole: the manifest with sizes and checksums, the mark of a good one, and a host part that can be read
back without executing anything.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nanproof._errors import RefusedFile, UsageError
from nanproof.scan._manifest import MANIFEST, NotWhole, crc32, read_manifest

FORMAT = 1
GOOD = "good.json"
NAME = re.compile(r"step-(\d{8,})(?:-(\d+))?")


def proven(path: Path) -> dict[str, Any]:
    """The mark that makes a checkpoint good. Raises `NotWhole` where there is none, or it speaks of something else."""
    if not (path / GOOD).is_file():
        raise NotWhole("a candidate: not enough healthy steps followed it")
    mark = read_manifest(path / GOOD)
    if mark.get("manifest") != crc32(path / MANIFEST):
        raise NotWhole(f"{GOOD} speaks of another manifest")
    return mark


def check_files(path: Path) -> None:
    """Read every file of a checkpoint and compare it with the manifest."""
    manifest = read_manifest(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        raise NotWhole(f"format {manifest.get('format')!r}; this version reads {FORMAT}")
    named = NAME.fullmatch(path.name)
    if named and manifest.get("step") != int(named[1]):
        raise NotWhole(f"it is the checkpoint of step {manifest.get('step')!r} under another name")
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        raise NotWhole(f"{MANIFEST} names no files")

    def compare(name: str) -> None:
        if Path(name).name != name or not isinstance(files[name], dict):
            raise NotWhole(f"{MANIFEST} names {name!r}")
        try:
            size = (path / name).stat().st_size
            if size != files[name].get("bytes"):
                raise NotWhole(f"{name} has {size} bytes instead of {files[name].get('bytes')}")
            if crc32(path / name) != files[name].get("crc32"):
                raise NotWhole(f"{name}: the checksum differs")
        except OSError as error:
            raise NotWhole(f"{name}: {error.strerror}") from error

    with ThreadPoolExecutor(min(4, len(files))) as pool:
        for _ in pool.map(compare, files):
            pass


def check_good(path: Path) -> None:
    """Raises `NotWhole` where a checkpoint is not proven, or not what it was."""
    proven(path)
    check_files(path)


def is_whole(path: Path) -> bool:
    try:
        check_good(path)
    except NotWhole:
        return False
    return True


def packed(host: Mapping[str, Any]) -> bytes:
    """A host part as bytes, after making sure that it can be read back without executing anything."""
    buffer = io.BytesIO()
    try:
        torch.save(dict(host), buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True, map_location="cpu")
    except Exception as error:
        what = next(_unreadable(host, ""), "")
        raise UsageError(
            f"the state of {what or 'the run'} cannot be saved: it holds more than numbers, texts and tensors ({error})"[:400]
        ) from error
    return buffer.getvalue()


def unpacked(path: Path) -> dict[str, Any]:
    try:
        host = torch.load(path, weights_only=True, map_location="cpu")
    except OSError as error:
        raise NotWhole(f"{path.name}: {error.strerror}") from error
    except Exception as error:
        raise RefusedFile(path, f"it is more than tensors and plain values ({str(error).splitlines()[0][:200]})") from error
    if not isinstance(host, dict) or host.get("version") != 1:
        raise RefusedFile(path, "it is no host part of a checkpoint of this version")
    return host


def _unreadable(value: Any, name: str) -> Iterator[str]:
    """The names of the parts that are no plain data."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _unreadable(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _unreadable(item, name)
    elif not isinstance(value, (str, bytes, int, float, bool, type(None), Tensor)):
        yield f"{name} ({type(value).__name__})"


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
