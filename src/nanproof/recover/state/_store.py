"""Store: checkpoints on the disk, each whole or not there, each with the proof of what it is.

    checkpoints/
      lock                     who writes here
      step-00000300/           the state in which step 300 was the next to be taken
        .metadata, *.distcp    tensors, as torch.distributed.checkpoint writes them
        host-0.pt              the rest of rank 0's state: plain values, read with weights_only=True
        manifest.json          size and checksum of every file
        good.json              only once the checkpoint has been proven; names the manifest it speaks of

A checkpoint is written under a hidden name, flushed, and renamed. It is deleted the other way round. Whatever moment the
process dies at, what has a plain name is whole, and `good.json` was written after `prove` healthy steps or not at all.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from nanproof._access import remove
from nanproof._errors import NanproofError, UsageError
from nanproof.core.judge._parameters import is_dtensor
from nanproof.core.support._files import FolderLock, not_writable, reason, strict_json, sync, write_whole
from nanproof.core.support._ranks import Ranks
from nanproof.recover.data._hashes import sample_hash
from nanproof.recover.state._sealed import FORMAT, GOOD, NAME, check_good, files_of, is_whole, now, packed, unpacked
from nanproof.scan._manifest import MANIFEST, NotWhole, crc32, read_manifest

log = logging.getLogger("nanproof")

_HIDDEN = re.compile(r"\.step-.*\.(?:partial|old)")


class NotWritten(NanproofError):
    """A checkpoint could not be written."""


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint on the disk."""

    path: Path
    step: int
    turn: int
    """The second, third, ... that was written of this step."""
    good: bool

    @property
    def order(self) -> tuple[int, int]:
        return self.step, self.turn


class Store:
    """One run's folder of checkpoints. Of several ranks, the first one writes, renames and deletes; each brings its own part."""

    _living: ClassVar[weakref.WeakValueDictionary[Path, Store]] = weakref.WeakValueDictionary()

    def __init__(self, folder: str | Path, keep: int, ranks: Ranks, group: Any = None, lock: bool = True) -> None:
        """`lock`: False in the process that writes for another, which has the lock."""
        self.folder, self.keep, self._ranks, self._group = Path(folder).absolute(), keep, ranks, group
        self._lock: FolderLock | None = None
        self._doomed: set[Path] = set()
        """Marked good, but damaged or of a way that was given up: gone as soon as a better one has been read back."""
        self._read_back: set[Path] = set()
        """Good ones that this process found whole."""
        if self._leads and lock:
            if (other := self._living.get(self.folder)) is not None and other._lock is not None:
                raise UsageError(
                    f"Checkpoints(folder={str(folder)!r}) is in use by another guard of this process: close that one first, or "
                    "give this one a folder of its own"
                )
            self._living[self.folder] = self
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._lock = FolderLock(self.folder, f"Checkpoints(folder={str(folder)!r})")
                weakref.finalize(self, self._lock.release)
                write_whole(self.folder / ".probe", "")
                (self.folder / ".probe").unlink()
            except OSError as error:
                self.close()
                raise not_writable(f"Checkpoints(folder={str(folder)!r})", error) from error
            self.clear()

    @property
    def _leads(self) -> bool:
        return not self._ranks.together or self._ranks.rank == 0

    @property
    def findings(self) -> tuple[set[Path], set[Path]]:
        """What is known of checkpoints beyond what is on the disk: which count no more, and which have been read back."""
        return set(self._doomed), set(self._read_back)

    @findings.setter
    def findings(self, known: tuple[set[Path], set[Path]]) -> None:
        self._doomed, self._read_back = known

    def clear(self) -> None:
        """Remove what a process that was killed left half written, or half deleted."""
        for path in self.folder.iterdir():
            if _HIDDEN.fullmatch(path.name):
                remove(path)

    def close(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    # -- what is there ---------------------------------------------------------------------------------------------------------

    def checkpoints(self) -> list[Saved]:
        """Every checkpoint, newest first."""
        found = []
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            match = NAME.fullmatch(path.name)
            if match and _is_ours(path):
                found.append(Saved(path, int(match[1]), int(match[2] or 1), _there(path / GOOD)))
        return sorted(found, key=lambda saved: saved.order, reverse=True)

    def newest_good(self, most: int | None = None, but: int = 0) -> tuple[Saved | None, list[str]]:
        """The newest good checkpoint of a step up to `most` whose checksums hold, after `but` others; and what was passed over,
        with the reasons."""
        passed = [
            f"{path.name}: it has no {MANIFEST}: emptied, or not nanproof's"
            for path in sorted(self.folder.glob("step-*"))
            if NAME.fullmatch(path.name) and path.is_dir() and not _is_ours(path)
        ]
        for saved in self.checkpoints():
            if most is not None and saved.step > most:
                continue
            try:
                check_good(saved.path)
            except NotWhole as why:
                passed.append(f"{saved.path.name}: {why}")
                if saved.good:
                    self._doomed.add(saved.path)
                continue
            self._read_back.add(saved.path)
            if but <= 0:
                return saved, passed
            but -= 1
        return None, passed

    # -- writing ---------------------------------------------------------------------------------------------------------------

    def write(self, step: int, tensors: Mapping[str, Tensor], host: Mapping[str, Any], own: Collection[str] = ()) -> Path:
        """Write a candidate. Every rank comes here; nothing of it stays if any of them fails.

        `own`: names of tensors that ranks may have different ones of, each. Single numbers, of which an optimizer has hundreds,
        go with the host's part: DCP would make a kilobyte of each.
        """
        numbers = {name: t.clone() for name, t in tensors.items() if not t.dim()}
        tensors = {name: t for name, t in tensors.items() if name not in numbers}
        host = {**host, "numbers": numbers}
        partial = self.folder / f".step-{step:08d}.partial"
        files: dict[str, Any] = {}
        trouble = self._tried(lambda: self._clear(partial) if self._leads else None)
        if not trouble and self._ranks.together:
            mine: dict[str, str] = {}
            trouble = self._tried(lambda: mine.update({name: sample_hash(tensors[name]) for name in _not_sharded(tensors, own)}))
            said = self._gathered(mine)
            # DCP writes one copy of what is not sharded, of whichever rank: the statistics of BatchNorm would change their rank.
            different = [name for name in mine if any(other.get(name) != mine[name] for other in said)]
            host = {**host, "own": {name: tensors[name].detach().cpu().clone() for name in different}}
        if not trouble:
            trouble = self._tried(lambda: self._write_tensors(partial, tensors))
        if not trouble:
            trouble = self._tried(lambda: files.update(self._write_own(partial, host)))
        path = self.folder
        if not trouble:
            for more in self._gathered(files):
                files.update(more)

            def publish() -> None:
                nonlocal path
                path = self._publish(partial, step, files)

            trouble = self._tried(lambda: publish() if self._leads else None)
        if trouble:
            if self._leads:
                remove(partial)
            raise NotWritten(trouble)
        return path

    def _clear(self, partial: Path) -> None:
        remove(partial)
        partial.mkdir()

    def _write_tensors(self, partial: Path, tensors: Mapping[str, Tensor]) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        options: dict[str, Any] = {"process_group": self._group}
        if "no_dist" in signature(save).parameters:
            options["no_dist"] = not self._ranks.together
        _hush()
        with _without_their_checksums():
            save(dict(tensors), storage_writer=FileSystemWriter(partial, overwrite=True), **options)

    def _write_own(self, partial: Path, host: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's rest, and the checksums of the files it wrote."""
        rank = self._ranks.rank if self._ranks.together else 0
        name = f"host-{rank}.pt"
        data = packed(host)
        with open(partial / name, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        mine = [name, *(path.name for path in partial.glob(f"__{rank}_*.distcp"))]
        if self._leads:
            mine.append(".metadata")
        return {name: {"bytes": (partial / name).stat().st_size, "crc32": crc32(partial / name)} for name in mine}

    def _publish(self, partial: Path, step: int, files: Mapping[str, Any]) -> Path:
        facts = {
            "format": FORMAT,
            "step": step,
            "ranks": self._ranks.world if self._ranks.together else 1,
            "at": now(),
            "torch": torch.__version__,
            "files": dict(sorted(files.items())),
        }
        (partial / MANIFEST).write_text(strict_json(facts), encoding="utf-8")
        sync(partial / MANIFEST)
        sync(partial)
        earlier = [saved for saved in self.checkpoints() if saved.step == step]
        turn = max((saved.turn for saved in earlier), default=0) + 1
        while os.path.lexists(path := self.folder / (f"step-{step:08d}" if turn == 1 else f"step-{step:08d}-{turn}")):
            turn += 1  # somebody else's file or link
        partial.rename(path)
        self._doomed.discard(path)
        self._read_back.discard(path)
        sync(self.folder)
        for saved in earlier:
            if not saved.good:
                self._delete(saved)
        return path

    def _tried(self, action: Callable[[], Any]) -> str:
        """Do something on every rank; what went wrong anywhere, on all of them. Ranks that fail alone would leave the others
        waiting."""
        trouble = ""
        try:
            action()
        except BaseException as error:  # DCP raises a BaseException of its own
            if not isinstance(error, Exception) and type(error).__name__ != "CheckpointException":
                raise
            failures = getattr(error, "failures", None)
            cause = next((e for e, _ in failures.values()), error) if failures else error
            trouble = reason(cause)
        return next((said for said in self._gathered(trouble) if said), "")

    def _gathered(self, mine: Any) -> list[Any]:
        if not self._ranks.together:
            return [mine]
        said = [None] * torch.distributed.get_world_size(self._group)
        torch.distributed.all_gather_object(said, mine, group=self._group)
        return said

    # -- proving and making room -----------------------------------------------------------------------------------------------

    def promote(self, step: int, healthy: int, preempted: bool = False) -> None:
        """A candidate has been proven; or the run had to stop after it, and goes on from it."""
        if not self._leads:
            return
        saved = next((saved for saved in self.checkpoints() if saved.step == step and not saved.good), None)
        if saved is None:
            return
        facts = {"format": FORMAT, "step": step, "healthy_steps": healthy, "at": now(), "manifest": crc32(saved.path / MANIFEST)}
        if preempted:
            facts["preempted"] = True
        write_whole(saved.path / GOOD, strict_json(facts))
        self._rotate()

    def abandon(self, since: int) -> None:
        """Checkpoints of steps after `since` lie on a way that was given up. Where no earlier one is good, the first good one of
        them stays until another is: a process that is killed now needs it."""
        later = [saved for saved in self.checkpoints() if saved.step > since] if self._leads else []
        spare = None
        if any(saved.good for saved in later) and self.newest_good(since)[0] is None:
            spare = next((saved for saved in reversed(later) if saved.good and is_whole(saved.path)), None)
        for saved in later:
            if saved is spare:
                self._doomed.add(saved.path)
            else:
                self._delete(saved)

    def _rotate(self) -> None:
        """Keep the last good ones. Before anything goes, they are read back: they must be worth relying on."""
        there = self.checkpoints()
        good = [saved for saved in there if saved.good and saved.path not in self._doomed]
        if not good:
            return
        stale = [saved for saved in there if saved.path in self._doomed or (not saved.good and saved.order < good[0].order)]
        if len(good) <= self.keep and not stale:
            return
        try:
            check_good(good[0].path)
        except NotWhole as why:
            log.warning("nanproof: %s: %s. No older checkpoint is deleted", good[0].path, why)
            self._doomed.add(good[0].path)
            return
        self._read_back.add(good[0].path)
        kept = 0
        for saved in good:
            if kept >= self.keep:
                self._delete(saved)
            else:
                kept += self._holds(saved)
        for saved in stale:
            self._delete(saved)

    def _holds(self, saved: Saved) -> bool:
        """Whether it may count as good. One that an earlier process wrote is read once."""
        if saved.path in self._read_back:
            return True
        try:
            check_good(saved.path)
        except NotWhole as why:
            log.warning("nanproof: %s: %s. It does not count as good any more", saved.path, why)
            self._doomed.add(saved.path)
            return False
        self._read_back.add(saved.path)
        return True

    def _delete(self, saved: Saved) -> None:
        hidden = saved.path.with_name(f".{saved.path.name}.old")
        with suppress(OSError):
            remove(hidden)
            saved.path.rename(hidden)  # so that nobody sees half a checkpoint
            remove(hidden)

    # -- reading ---------------------------------------------------------------------------------------------------------------

    def load(self, saved: Saved, targets: Callable[[Any], dict[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, Any], bool]:
        """Tensors, host part, and whether the host part is of this very rank. `targets` makes the tensors to load into from the
        checkpoint's metadata."""
        from torch.distributed.checkpoint.state_dict_loader import load as theirs

        from nanproof.scan._dcp import load, read_whole

        rank = self._ranks.rank if self._ranks.together else 0
        own = (saved.path / f"host-{rank}.pt").is_file()
        tensors: dict[str, Tensor] = {}
        host: dict[str, Any] = {}

        def prepare() -> None:
            metadata = read_whole(saved.path)
            named = {info.relative_path for info in metadata.storage_data.values()} | {f"host-{rank if own else 0}.pt"}
            if unchecked := named - files_of(read_manifest(saved.path / MANIFEST)).keys():
                raise NotWhole(f"{MANIFEST} does not name {min(unchecked)}, so that nothing is known of it")
            tensors.update(targets(metadata))
            host.update(unpacked(saved.path / f"host-{rank if own else 0}.pt"))

        if trouble := self._tried(prepare):
            raise NotWhole(trouble)
        options: dict[str, Any] = {"process_group": self._group}
        if "no_dist" in signature(theirs).parameters:
            options["no_dist"] = not self._ranks.together
        _hush()
        try:
            load(tensors, saved.path, **options)
        except Exception as error:  # on every rank: DCP tells them of each other's troubles
            raise NotWhole(reason(error)) from error
        for name, tensor in host.pop("own", {}).items():
            if name in tensors and tensors[name].shape == tensor.shape:
                tensors[name] = tensor
        return {**tensors, **host.pop("numbers")}, host, own


def _hush() -> None:
    """DCP wonders aloud about a run of a single process, each time."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


@contextmanager
def _without_their_checksums() -> Iterator[None]:
    """torch checks every tensor's bytes inside the file too, at a seventh of the speed of zlib; the manifest has that covered."""
    change = getattr(torch.serialization, "set_crc32_options", None)
    before = torch.serialization.get_crc32_options() if change is not None else True
    if change is not None:
        change(False)
    try:
        yield
    finally:
        if change is not None:
            change(before)


def _not_sharded(tensors: Mapping[str, Tensor], names: Collection[str]) -> list[str]:
    return [name for name in sorted(names) if name in tensors and not is_dtensor(tensors[name])]


def _is_ours(path: Path) -> bool:
    """Others may name their folders like this too."""
    return _there(path / MANIFEST) or _there(path / GOOD)


def _there(path: Path) -> bool:
    """Whether this is a file. One in a folder that may not be looked into counts: whoever reads it says why it cannot."""
    try:
        return path.is_file()
    except PermissionError:
        return True
