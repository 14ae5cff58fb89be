"""The reader's half of the bundle: check every file, then unpack it. What is wrong is said with the place and what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

from torch import Tensor

from nanproof._access import parse_json, read_bytes
from nanproof._errors import UsageError
from nanproof._records import Incident, StepRecord
from nanproof._text import one_line
from nanproof.explain.bundle._bundle import FORMAT, Bundle
from nanproof.explain.bundle._facts import ModeFacts, OptimizerFacts, dtype_of, random_in
from nanproof.explain.bundle._pack import Unpacker, nearest
from nanproof.explain.bundle._shelf import MANIFEST, digest

_PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
MOST_THREADS = 1024
MOST_JSON = 64 << 20
"""Bytes of the manifest, which names every parameter, or of a record."""
SPARSE = 1 << 30
"""Bytes from which on a file must take room on the disk, too."""
_COPY_AGAIN = "Copy the whole folder again from where it was written"


def read(folder: Path, to_devices: bool) -> Bundle:
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder. Give the folder of a bundle, run_dir/incidents/step-...")
    if not (folder / MANIFEST).is_file():
        raise UsageError(
            f"{folder} is not a bundle: it has no {MANIFEST}. Give the folder of a bundle, run_dir/incidents/step-..."
        )
    manifest = _json(folder / MANIFEST)
    version = manifest.get("format")
    if version != FORMAT:
        raise UsageError(
            f"{folder / MANIFEST}: format {one_line(repr(version), 100)}, and this nanproof reads format {FORMAT}. Use the "
            f"nanproof that wrote it: {_writer(manifest)}"
        )
    try:
        files = _verified(folder, manifest["files"])
        return _bundle(folder, manifest, files, to_devices)
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{folder / MANIFEST} is not as docs/format.md has it ({type(error).__name__}: {one_line(error, 300)}). {_COPY_AGAIN}"
        ) from error


def _bundle(folder: Path, manifest: Mapping[str, Any], files: set[str], to_devices: bool) -> Bundle:
    def unpacker(name: str) -> Unpacker:
        return Unpacker(_tensors(folder, name, files), str(folder / name), to_devices)

    batch = unpacker("batch.safetensors")
    random = Unpacker(_tensors(folder, "random.safetensors", files), str(folder / "random.safetensors"))
    _need(folder, "incident.json", files)
    record = None
    if "record.json" in files:
        data = _json(folder / "record.json")
        record = StepRecord.from_json(data, data["names"])
    weights = None
    if manifest["weights"] is not None:
        stored = _tensors(folder, "weights.safetensors", files)
        renamed = manifest["weights"]
        nodes = {name: {"tensor": name} for name in stored} | renamed
        maker = Unpacker(stored, str(folder / "weights.safetensors"))
        weights = {name: maker.unpack(node) for name, node in nodes.items()}
    optimizer = None
    if manifest["optimizer"] is not None:
        optimizer = _optimizer(manifest["optimizer"], unpacker("optimizer.safetensors"))
    mode = manifest["mode"]
    _check_facts(manifest)
    return Bundle(
        path=folder,
        created=manifest["created"],
        incident=Incident.from_json(_json(folder / "incident.json")),
        record=record,
        batches=_some(tuple(batch.unpack(node) for node in manifest["batches"])),
        random=random_in(random.unpack(manifest["random"])),
        mode=ModeFacts(mode["training"], mode["autocast"], dtype_of(mode["autocast_dtype"]), mode["numerics"]),
        weights=weights,
        optimizer=optimizer,
        policy=manifest["policy"],
        checkpoint=manifest["checkpoint"],
        versions=manifest["versions"],
        device=manifest["device"],
        device_name=manifest["device_name"],
        left_out=tuple(manifest["left_out"]),
    )


def _check_facts(manifest: Mapping[str, Any]) -> None:
    """Raise `ValueError` or `TypeError` where something else stands than a bundle has there."""
    mode, numerics = manifest["mode"], manifest["mode"]["numerics"]
    texts = (
        manifest["created"],
        manifest["device"],
        manifest["device_name"],
        *manifest["left_out"],
        *manifest["versions"].values(),
    )
    right = all(isinstance(text, str) for text in texts) and isinstance(manifest["checkpoint"], (str, NoneType))
    right = right and isinstance(mode["autocast"], bool) and all(isinstance(on, bool) for on in mode["training"].values())
    threads = numerics.get("threads", 1)
    right = right and type(threads) is int and 0 < threads <= MOST_THREADS
    right = right and dtype_of(numerics.get("default_dtype", "float32")).is_floating_point
    right = right and isinstance(numerics.get("deterministic", False), bool)
    if not right or numerics.get("float32_matmul_precision", "highest") not in ("highest", "high", "medium"):
        raise ValueError("a field of another kind")
    nearest(manifest["device"])


def _optimizer(data: Mapping[str, Any], maker: Unpacker) -> OptimizerFacts:
    state = None if data["state"] is None else {name: maker.unpack(node) for name, node in data["state"].items()}
    inside = tuple(_optimizer(each, maker) for each in data.get("inside", ()))
    return OptimizerFacts(data["class"], tuple(maker.unpack(node) for node in data["groups"]), state, inside)


def _verified(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> set[str]:
    for name, facts in files.items():
        if not _PLAIN_NAME.fullmatch(name):
            raise UsageError(
                f"{folder / MANIFEST} names a file outside the bundle: {one_line(repr(name), 200)}. "
                "Do not trust it: ask where it comes from"
            )
        path = folder / name
        if len(name) > 255 or path.is_symlink() or not path.is_file():
            raise UsageError(f"{folder / one_line(name, 100)} is missing. {_COPY_AGAIN}")
        about = path.stat()
        size = about.st_size
        if size != facts["bytes"]:
            raise UsageError(f"{path} has {size} bytes, and {one_line(facts['bytes'], 40)} were written. {_COPY_AGAIN}")
        if size > SPARSE and about.st_blocks * 512 < size // 1024:  # a checksum of nothing takes as long as one of something
            raise UsageError(f"{path} has {size} bytes, of which next to none are on the disk. {_COPY_AGAIN}")
        if digest(path) != facts["sha256"]:
            raise UsageError(f"{path} was changed or damaged: its checksum is not the one in {MANIFEST}. {_COPY_AGAIN}")
    return set(files)


def _need(folder: Path, name: str, files: set[str]) -> None:
    if name not in files:
        raise UsageError(f"{folder / MANIFEST} does not list {name}, without which there is no bundle. {_COPY_AGAIN}")


def _tensors(folder: Path, name: str, files: set[str]) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    _need(folder, name, files)
    try:
        return load_file(folder / name)
    except Exception as error:
        raise UsageError(f"{folder / name} is not a safetensors file ({one_line(error, 200)}). {_COPY_AGAIN}") from error


def _json(path: Path) -> dict[str, Any]:
    def refuse(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        data = parse_json(read_bytes(path, MOST_JSON).decode("utf-8"), parse_constant=refuse)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON ({one_line(error, 200)}). {_COPY_AGAIN}") from error
    if not isinstance(data, dict):
        raise UsageError(f"{path} holds no JSON object. {_COPY_AGAIN}")
    return data


def _writer(manifest: Mapping[str, Any]) -> str:
    versions = manifest.get("versions")
    known = versions.get("nanproof") if isinstance(versions, dict) else None
    return "it does not say which" if known is None else f"nanproof {one_line(known, 40)}"


def _some(batches: tuple[Any, ...]) -> tuple[Any, ...]:
    if not batches:
        raise UsageError("the bundle holds no batch, so there is nothing to run again. Copy the whole folder anew")
    return batches
