"""Shelf: the folder in which bundles lie, each whole or not there at all.

A bundle is written by a thread of its own into a hidden folder, flushed to the disk, and renamed. Training never waits for it,
and whatever goes wrong with the disk is a warning.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import re
import shutil
import threading
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor

from nanproof._access import check_own, own_folder, remove
from nanproof.core.support._files import finish, not_writable, reason, strict_json, sync

log = logging.getLogger("nanproof")

MANIFEST = "manifest.json"
_BUNDLE = re.compile(r"step-\d{6,}-[a-z-]+(?:-\d+)?")
_PARTIAL = re.compile(r"\.step-.*\.(\d+)\.partial")
_writing: set[Path] = set()
"""Hidden folders that this process is busy with."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """A bundle that is to be written, in host memory."""

    name: str
    manifest: dict[str, Any]
    texts: Mapping[str, Mapping[str, Any]]
    tensors: Mapping[str, dict[str, Tensor]]
    size: int


Parcels: TypeAlias = "queue.Queue[Parcel | None]"


class Shelf:
    """Takes parcels and writes them in order."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self._keep = folder, keep
        self._parcels: Parcels = queue.Queue()
        self._promised: set[str] = set()
        self.failed: set[str] = set()
        """Names of bundles that could not be written: the disk was full, say."""
        self._end: Callable[[], Any] | None = None
        self.closed = False
        try:
            check_own(folder)
        except OSError as error:
            raise not_writable(f"the folder of bundles {str(folder)!r}", error) from error
        _remove_leftovers(folder)

    @property
    def waiting(self) -> int:
        """Bytes that are held in memory for the disk, without the bundle that is being written."""
        return sum(parcel.size for parcel in list(self._parcels.queue) if parcel is not None)

    def free_name(self, step: int, kind: str) -> str:
        """The name of a new bundle; a step that comes a second time (after a resume) gets a number."""
        name = f"step-{step:06d}-{kind}"
        count = 1
        while (unique := name if count == 1 else f"{name}-{count}") in self._promised or os.path.lexists(self.folder / unique):
            count += 1
        return unique

    def put(self, parcel: Parcel) -> Path:
        if self._end is None:
            worker = threading.Thread(
                target=_work, args=(self._parcels, self.folder, self._keep, self.failed), daemon=True, name="nanproof-bundles"
            )
            worker.start()
            # Also when the program ends: a run that dies of its bad step is the one whose bundle matters.
            self._end = weakref.finalize(self, finish, self._parcels, worker, os.getpid())
        self._promised.add(parcel.name)
        self._parcels.put(parcel)
        return self.folder / parcel.name

    def flush(self) -> None:
        self._parcels.join()

    def close(self) -> None:
        self.closed = True
        if self._end is not None:
            self._end()


def _work(parcels: Parcels, folder: Path, keep: int, failed: set[str]) -> None:
    while True:
        parcel = parcels.get()
        try:
            if parcel is None:
                return
            write_parcel(folder, parcel)
            _remove_oldest(folder, keep, parcel.name)
        except Exception as error:
            assert parcel is not None
            failed.add(parcel.name)
            log.warning("nanproof: the bundle %s was not written: %s. Training goes on", folder / parcel.name, reason(error))
        finally:
            parcel = None  # its memory is not kept until the next one comes
            parcels.task_done()


def write_parcel(folder: Path, parcel: Parcel) -> None:
    from safetensors.torch import save_file

    partial = _hidden(folder, parcel.name)
    _writing.add(partial)
    try:
        own_folder(folder)
        remove(partial)
        partial.mkdir()
        for name, data in parcel.texts.items():
            (partial / name).write_text(strict_json(data), encoding="utf-8")
        for name, tensors in parcel.tensors.items():
            save_file(tensors, partial / name)
            shutil.copymode(partial / next(iter(parcel.texts)), partial / name)  # safetensors lets only the owner read
        files = {}
        for path in sorted(partial.iterdir()):
            sync(path)
            files[path.name] = {"bytes": path.stat().st_size, "sha256": digest(path)}
        (partial / MANIFEST).write_text(strict_json({**parcel.manifest, "files": files}), encoding="utf-8")
        sync(partial / MANIFEST)
        sync(partial)
        partial.rename(folder / parcel.name)
        sync(folder)
    except BaseException:
        remove(partial)
        raise
    finally:
        _writing.discard(partial)


def digest(path: Path) -> str:
    found = hashlib.sha256()
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            found.update(part)
    return found.hexdigest()


def _hidden(folder: Path, name: str) -> Path:
    return folder / f".{name}.{os.getpid()}.partial"


def _remove_oldest(folder: Path, keep: int, newest: str) -> None:
    """Keep that many bundles; the one just written is always among them. Other folders are not touched."""
    old = []
    for path in folder.iterdir():
        if _BUNDLE.fullmatch(path.name) and path.name != newest and not path.is_symlink():
            with suppress(OSError):
                old.append(((path / MANIFEST).stat().st_mtime_ns, path.name))
    for _, name in sorted(old)[: max(0, len(old) + 1 - keep)]:
        with suppress(OSError):
            hidden = _hidden(folder, name)
            remove(hidden)
            (folder / name).rename(hidden)  # so that nobody sees half a bundle
            remove(hidden)


def _remove_leftovers(folder: Path) -> None:
    """What killed runs left half written. A process that is alive may still be at it."""
    if not folder.is_dir():
        return
    with suppress(OSError):
        for path in folder.iterdir():
            match = _PARTIAL.fullmatch(path.name)
            if match and path not in _writing and not _someone_else(int(match[1])):
                remove(path)


def _someone_else(pid: int) -> bool:
    if pid == os.getpid():
        return False  # in a container, the killed run had the same number
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass
    return True
