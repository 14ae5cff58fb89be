"""Reading the folders of torch.distributed.checkpoint (DCP) without executing anything that lies in them.

The stock reader unpickles `.metadata`, and the stock planner unpickles every entry that is no tensor: both run whatever the file
tells them to. Here `.metadata` is unpickled into inert stand-ins, from which the real classes are built once every field was
looked at, and entries are read with `weights_only=True`. DCP wraps what a reader raises in `CheckpointException`, which is no
`Exception`: `load` takes the reason out of it.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path, PurePosixPath
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.futures import Future

from nanproof._access import OddFile, open_regular, read_bytes
from nanproof._errors import NanproofError, RefusedFile, UsageError
from nanproof._text import one_line
from nanproof.scan._inside import METADATA, UnreadableFile, first_line, path_inside
from nanproof.scan._pickles import Suspicious, check_pickle, collector_paused
from nanproof.scan._torch_files import check_torch, load_entry

MOST_METADATA = 1 << 28
"""Bytes of a `.metadata` that are read at most. That of a large model on a thousand ranks has some hundred megabytes."""

_METADATA_MODULE = "torch.distributed.checkpoint.metadata"
_OLD_MODULE = "torch.distributed._shard.sharded_tensor.metadata"  # where torch before 2.3 had the properties
_RECORDS = {
    (_METADATA_MODULE, "Metadata"),
    (_METADATA_MODULE, "MetadataIndex"),
    (_METADATA_MODULE, "TensorStorageMetadata"),
    (_METADATA_MODULE, "BytesStorageMetadata"),
    (_METADATA_MODULE, "ChunkStorageMetadata"),
    (_METADATA_MODULE, "StorageMeta"),
    (_METADATA_MODULE, "TensorProperties"),
    (_OLD_MODULE, "TensorProperties"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
}
_ENCODINGS = {(_METADATA_MODULE, "_MEM_FORMAT_ENCODING"), (_OLD_MODULE, "MEM_FORMAT_ENCODING")}
_MEMORY_FORMATS = (torch.contiguous_format, torch.channels_last, torch.preserve_format)
_FORMAT_NAMES = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
_HARMLESS = {
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
}
_PATHS = {"Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath"}


def read_metadata(folder: Path, rank: int | None = None) -> Metadata:
    """What `.metadata` (or `__RANK.metadata`) of a checkpoint says. Raises `RefusedFile` where it is anything but plain facts."""
    path = folder / (METADATA if rank is None else f"__{rank}{METADATA}")
    if not path.is_file():
        raise UsageError(f"{folder} is no DCP checkpoint: it has no {path.name}. Give the folder that dcp.save wrote")
    try:
        data = read_bytes(path, MOST_METADATA)
        check_pickle(data, _size(folder))
        with collector_paused():
            metadata = _Builder(path).metadata(_Unpickler(io.BytesIO(data), path).load())
    except RefusedFile:
        raise
    except Suspicious as error:
        raise RefusedFile(path, str(error)) from None
    except OddFile as error:
        raise RefusedFile(path, error.strerror or str(error)) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except Exception as error:  # a damaged pickle raises nearly anything
        raise RefusedFile(path, f"not the metadata of a checkpoint, or damaged ({first_line(error)})") from error
    for name in {info.relative_path for info in metadata.storage_data.values()}:
        path_inside(folder, name, path)
    return metadata


def _size(folder: Path) -> int:
    """Bytes of a checkpoint's files: the more there are, the longer its description may be."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


class SafeReader(FileSystemReader):
    """A `FileSystemReader` that executes nothing. Give it to `dcp.load` together with a `SafePlanner`, or call `load`."""

    refused: NanproofError | None = None
    """Why the metadata was not read. DCP only logs it, tries elsewhere, and then complains that there is none."""
    known: Metadata | None = None
    """The metadata, if it was read before."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            metadata = self.known or read_whole(Path(self.path), kwargs.get("rank"))
        except NanproofError as error:
            self.refused = self.refused or error
            raise
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Look at every entry that is going to be read, then read."""
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            path = Path(self.path) / info.relative_path
            if getattr(info, "transform_descriptors", None):
                continue  # only what is inside could be looked at; an extension of DCP's unpacks it
            try:
                with open_regular(path) as file:
                    check_torch(file, path, info.offset, info.length)
            except UnreadableFile as error:
                raise RefusedFile(path, f"{item.storage_index.fqn!r} cannot be read from it: {error}") from error
        return super().read_data(plan, planner)


class SafePlanner(DefaultLoadPlanner):
    """A `DefaultLoadPlanner` that reads entries which are no tensors with `weights_only=True`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            loaded = load_entry(value.read(), f"entry {name!r}")
        except UnreadableFile as error:
            raise RefusedFile(f"entry {name!r}", f"it is more than tensors and plain values ({error})") from error
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[name], loaded)
        else:
            self.state_dict[name] = loaded


def load(state_dict: dict[str, Any], folder: Path, *, planner: SafePlanner | None = None, **more: Any) -> None:
    """`dcp.load` with the safe reader and planner.

    Raises `RefusedFile` for a file that is damaged or not what it says, and `UsageError` if the checkpoint does not hold what
    `state_dict` asks for, instead of a `CheckpointException`.
    """
    reader = SafeReader(folder)
    if not (dist.is_available() and dist.is_initialized()):  # DCP would log a page if this fails; ranks have to fail together
        reader.known = reader.read_metadata()
    try:
        load_checkpoint(state_dict, storage_reader=reader, planner=planner or SafePlanner(), **more)
    except CheckpointException as wrapped:
        if reader.refused is not None:
            raise reader.refused from None
        for error, _ in wrapped.failures.values():
            if isinstance(error, (NanproofError, OSError)):
                raise error from None
            if isinstance(error, Exception):
                raise UsageError(f"{folder} does not hold what is asked for ({first_line(error)})") from error
        raise


def read_whole(folder: Path, rank: int | None = None) -> Metadata:
    """The metadata of a checkpoint that is to be loaded. Raises `RefusedFile` unless the chunks of every tensor make it up (DCP
    would leave the rest as it was in memory) and their files can hold them."""
    metadata = read_metadata(folder, rank)
    infos = metadata.storage_data.values()
    claimed = 0
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            inside = all(
                len(chunk.sizes) == len(chunk.offsets) == len(entry.size)
                and all(at + size <= most for at, size, most in zip(chunk.offsets, chunk.sizes, entry.size, strict=True))
                for chunk in entry.chunks
            )
            if not inside or sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
                raise RefusedFile(folder / METADATA, f"the chunks of {name!r} do not make up the tensor")
            claimed += entry.size.numel() * entry.properties.dtype.itemsize
    packed = any(getattr(info, "transform_descriptors", None) for info in infos)
    if claimed > sum(info.length for info in infos) and not packed:
        raise RefusedFile(folder / METADATA, f"its tensors claim {claimed} bytes, more than its entries have")
    return metadata


class _Record:
    """A stand-in: holds what a pickle said about one object. No class of torch is within the pickle's reach."""

    kind = ""
    state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Knows the names that the metadata of checkpoints consists of, and no others."""

    def __init__(self, file: io.BytesIO, path: Path) -> None:
        super().__init__(file)
        self._path = path
        # Classes made for this reading alone: a pickle may set attributes on the classes it is given.
        self._records = {name: type(name[1], (_Record,), {"kind": name[1]}) for name in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        key = (module, name)
        if key in self._records:
            return self._records[key]
        if key in _HARMLESS:
            return _HARMLESS[key]
        if key in _ENCODINGS:
            return lambda number: _MEMORY_FORMATS[number]
        if module == "torch" and isinstance(value := vars(torch).get(name), (torch.dtype, torch.layout, torch.memory_format)):
            return value
        if key == ("torch.serialization", "_get_layout"):
            return _layout
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return lambda *parts: str(PurePosixPath(*parts))
        if key in (("builtins", "getattr"), ("__builtin__", "getattr")):  # how Python 3.11.0 to 3.11.3 pickles enums
            return lambda _, member: _MEMORY_FORMATS[_FORMAT_NAMES.index(member)]
        asked = one_line(f"{module}.{name}", 200)
        raise RefusedFile(self._path, f"it asks for {asked}, which no description of tensors needs")

    def persistent_load(self, pid: Any) -> Any:
        raise RefusedFile(self._path, "it refers to objects outside the file")


def _layout(name: str) -> torch.layout:
    found = vars(torch).get(name.removeprefix("torch."))
    if not isinstance(found, torch.layout):
        raise ValueError(f"no layout {name!r}")
    return found


def _known(kind: Any, **values: Any) -> dict[str, Any]:
    """Those of the fields that this version of torch has."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in values.items() if name in names}


class _Builder:
    """Makes the real objects from the stand-ins, and takes no field on trust."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def metadata(self, said: Any) -> Metadata:
        state = self._state(said, "Metadata")
        storage = self._of(state.get("storage_data"), dict)
        made = {self._index(key): self._info(value) for key, value in storage.items()}
        entries = self._of(state.get("state_dict_metadata"), dict)
        version = _known(Metadata, version=state.get("version"))
        meta = state.get("storage_meta")
        return Metadata(
            state_dict_metadata={self._of(name, str): self._entry(entry) for name, entry in entries.items()},
            planner_data=self._mappings(state.get("planner_data")),
            storage_data=made,
            storage_meta=None if meta is None else self._meta(meta),
            **version,
        )

    def _entry(self, said: Any) -> TensorStorageMetadata | BytesStorageMetadata:
        if isinstance(said, _Record) and said.kind == "BytesStorageMetadata":
            return BytesStorageMetadata()
        state = self._state(said, "TensorStorageMetadata")
        chunks = [self._state(chunk, "ChunkStorageMetadata") for chunk in self._of(state["chunks"], list)]
        return TensorStorageMetadata(
            properties=self._properties(state["properties"]),
            size=self._sizes(state["size"]),
            chunks=[ChunkStorageMetadata(self._sizes(chunk["offsets"]), self._sizes(chunk["sizes"])) for chunk in chunks],
        )

    def _properties(self, said: Any) -> TensorProperties:
        if not isinstance(said, _Record) or said.kind != "TensorProperties":
            raise self._wrong(said, "the properties of a tensor")
        dtype, layout, requires_grad, memory_format, pinned = self._of(said.state, tuple)
        return TensorProperties(
            dtype=self._of(dtype, torch.dtype),
            layout=self._of(layout, torch.layout),
            requires_grad=self._of(requires_grad, bool),
            memory_format=self._of(memory_format, torch.memory_format),
            pin_memory=self._of(pinned, bool),
        )

    def _index(self, said: Any) -> MetadataIndex:
        state = self._state(said, "MetadataIndex")
        offset, index = state.get("offset"), state.get("index")
        return MetadataIndex(
            self._of(state["fqn"], str),
            None if offset is None else self._sizes(offset),
            None if index is None else self._of(index, int),
        )

    def _info(self, said: Any) -> _StorageInfo:
        state = self._state(said, "_StorageInfo")
        offset, length = self._sizes((state["offset"], state["length"]))
        transforms = state.get("transform_descriptors")
        if not transforms:
            return _StorageInfo(self._of(state["relative_path"], str), offset, length)
        names = _known(_StorageInfo, transform_descriptors=[self._of(name, str) for name in transforms])
        if not names:
            raise RefusedFile(self._path, "its entries are transformed, which this torch cannot read")
        return _StorageInfo(self._of(state["relative_path"], str), offset, length, **names)

    def _meta(self, said: Any) -> StorageMeta:
        state = self._state(said, "StorageMeta")
        texts = {name: state.get(name) for name in ("checkpoint_id", "save_id", "load_id")}
        made = {name: None if text is None else self._of(text, str) for name, text in texts.items()}
        modules = [self._of(name, str) for name in self._of(state.get("modules", []), list)]
        return StorageMeta(**_known(StorageMeta, **made, modules=modules))

    def _mappings(self, said: Any) -> dict[str, tuple[str | int, ...]] | None:
        """The way through the nested state dict to each entry, which is all that DCP's own planners leave here."""
        if said is None:
            return None
        made = {}
        for name, way in self._of(said, dict).items():
            if not isinstance(way, (tuple, list)) or not all(isinstance(key, (str, int)) for key in way):
                raise self._wrong(way, "the keys of a nested dictionary")
            made[self._of(name, str)] = tuple(way)
        return made

    def _sizes(self, said: Iterable[Any]) -> torch.Size:
        if not isinstance(said, tuple) or not all(type(number) is int and 0 <= number < 1 << 62 for number in said):
            raise self._wrong(said, "sizes")
        return torch.Size(said)

    def _state(self, said: Any, kind: str) -> dict[str, Any]:
        if not isinstance(said, _Record) or said.kind != kind:
            raise self._wrong(said, kind)
        state: dict[str, Any] = self._of(said.state, dict)
        return state

    def _of(self, said: Any, kind: type) -> Any:
        if not isinstance(said, kind):
            raise self._wrong(said, kind.__name__)
        return said

    def _wrong(self, said: Any, wanted: str) -> RefusedFile:
        return RefusedFile(self._path, f"damaged or made up: {type(said).__name__} where {wanted} belongs")
