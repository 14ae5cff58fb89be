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
from nanproof._text import one_line
from nanproof.scan._inside import METADATA, UnreadableFile
from nanproof.scan._manifest import MANIFEST, NotWhole, crc32, read_manifest
from nanproof.scan._torch_files import load_torch

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
        raise NotWhole(f"format {one_line(repr(manifest.get('format')), 100)}; this version reads {FORMAT}")
    named = NAME.fullmatch(path.name)
    if named and manifest.get("step") != int(named[1]):
        raise NotWhole(f"it is the checkpoint of step {one_line(repr(manifest.get('step')), 40)} under another name")
    files = files_of(manifest)
    if unchecked := [file.name for file in path.iterdir() if _is_part(file.name) and file.name not in files]:
        raise NotWhole(f"{MANIFEST} does not name {min(unchecked)}, so that nothing is known of it")
    if METADATA not in files:
        raise NotWhole(f"{MANIFEST} does not name {METADATA}")
    if type(manifest.get("ranks")) is not int or manifest["ranks"] != sum(name.startswith("host-") for name in files):
        raise NotWhole(f"{MANIFEST} does not name a host part for each of its ranks")

    def compare(name: str) -> None:
        if Path(name).name != name or not name.isprintable() or not isinstance(files[name], dict):
            raise NotWhole(f"{MANIFEST} names {one_line(ascii(name), 100)}")
        try:
            size = (path / name).stat().st_size
            if size != files[name].get("bytes"):
                raise NotWhole(f"{name} has {size} bytes instead of {one_line(files[name].get('bytes'), 40)}")
            if crc32(path / name) != files[name].get("crc32"):
                raise NotWhole(f"{name}: the checksum differs")
        except OSError as error:
            raise NotWhole(f"{one_line(name, 100)}: {error.strerror}") from error

    with ThreadPoolExecutor(min(4, len(files))) as pool:
        for _ in pool.map(compare, files):
            pass


def files_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What a manifest says of each file. Raises `NotWhole` if it names none."""
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        raise NotWhole(f"{MANIFEST} names no files")
    return files


def _is_part(name: str) -> bool:
    """Whether a file of this name would be read when the checkpoint is loaded."""
    return name == METADATA or name.endswith(".distcp") or (name.startswith("host-") and name.endswith(".pt"))


def check_good(path: Path) -> None:
    """Raises `NotWhole` where a checkpoint is not proven, or not what it was."""
    try:
        proven(path)
        check_files(path)
    except OSError as error:  # a folder that this user may not look into
        raise NotWhole(error.strerror or str(error)) from error


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
    """The host part in a file, with every field that a run needs."""
    try:
        host = load_torch(path)
    except UnreadableFile as error:
        raise NotWhole(f"{path.name}: {error}") from error
    if type(host) is not dict or host.get("version") != 1:
        raise RefusedFile(path, "it is no host part of a checkpoint of this version")
    for name, kind in {**_NEEDED, **{name: kind for name, kind in _MAY_BE.items() if name in host}}.items():
        if type(host.get(name)) is not kind:
            raise RefusedFile(path, f"its {name!r} is missing or not what it should be")
    tensors = {**host["numbers"], **host.get("own", {})}
    if not all(isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()):
        raise RefusedFile(path, "it holds something else where tensors belong")
    schedules: list[dict[str, Any]] = [host[name] for name in ("schedule", "next_schedule") if name in host]
    for schedule in schedules:
        groups = schedule.get("groups")
        if type(groups) is not list or not all(type(group) is dict for group in groups) or "scheduler" not in schedule:
            raise RefusedFile(path, "it holds no settings of the optimizer")
    if _expanded(host) > MOST_VALUES:
        raise RefusedFile(path, "its values contain each other again and again")
    return host


MOST_VALUES = 10_000_000
_NEEDED = {"step": int, "kinds": dict, "random": dict, "schedule": dict, "optimizer": dict, "parts": dict, "data": list}
_NEEDED["numbers"] = dict
_MAY_BE = {"optimizer_more": dict, "attributes": list, "shells": dict, "own": dict, "next_schedule": dict}


def _expanded(value: Any) -> float:
    """How many values there are if what is there in several places counts each time; infinite if something contains itself.
    Whoever copies them visits as many."""
    counts: dict[int, float] = {}
    waiting = [value]
    while waiting:
        one = waiting[-1]
        inside = list(one.values()) if isinstance(one, dict) else one if isinstance(one, (list, tuple)) else ()
        held = [item for item in inside if isinstance(item, (dict, list, tuple))]
        new = [item for item in held if id(item) not in counts]
        if id(one) not in counts:
            counts[id(one)] = float("inf")  # until all that is in it has been counted
            waiting += new
        else:
            waiting.pop()
            if new or counts[id(one)] == float("inf"):
                counts[id(one)] = len(inside) + 1 + sum(counts[id(item)] for item in held)
    return counts[id(value)]


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
