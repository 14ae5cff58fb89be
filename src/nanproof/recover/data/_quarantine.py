"""The file of offending samples: what a run learned about its data outlives it.

One line of JSON a sample, only ever appended, flushed to the disk before the call returns. Several processes may append to one
file: a line goes out in one write. What cannot be read is a warning, and what cannot be written stays in memory until it can.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeAlias

from nanproof._access import OddFile, open_append, open_regular, parse_json
from nanproof.core.journal._lines import cut_broken_line
from nanproof.core.support._files import not_writable
from nanproof.recover.data._hashes import sample_hash

__all__ = ["FILE", "Entry", "Quarantine", "StreamFilter", "sample_hash"]

log = logging.getLogger("nanproof")

FILE = "quarantine.jsonl"
MOST_BYTES = 64 << 20
"""Of the file that are read: some hundred thousand samples."""
LONGEST_LINE = 1 << 16

StreamPlace: TypeAlias = tuple[int | None, int | None, int | None]
"""A sample of a stream: the worker that read it, how many workers there were, its ordinal in what that worker read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One offending sample."""

    index: int | None
    """Place in a map-style dataset, or ordinal in an iterable one (among what its worker reads, from 0)."""
    hash: str | None
    """See `sample_hash`."""
    size: int | None
    """Length of the map-style dataset when this was written; None for an iterable one."""
    worker: int | None
    workers: int | None
    """Of an iterable dataset that is read by worker processes; else None."""
    step: int
    cause: str
    bundle: str | None
    at: str
    """Time in UTC, as ISO 8601 writes it."""

    @property
    def what(self) -> tuple[Any, ...]:
        """What tells one sample from another."""
        return (self.index, self.hash, self.size, self.worker, self.workers)


@dataclass(frozen=True, slots=True)
class StreamFilter:
    """What an iterable dataset leaves out. Small and plain: it travels to the worker processes."""

    hashes: frozenset[str]
    places: frozenset[StreamPlace]


class Quarantine:
    """The entries of a file, and of this run. Without a path they are kept in memory only."""

    def __init__(self, path: Path | None) -> None:
        self.path = None if path is None else Path(path)
        self._entries: list[Entry] = []
        self._known: set[tuple[Any, ...]] = set()
        self._read_to = 0
        self._unwritten: list[Entry] = []
        """Entries of this run that did not reach the disk yet."""
        self._torn = False
        """The file ends in half a line of this run."""
        self._foreign: set[tuple[int, int]] = set()
        if self.path is not None:
            try:
                cut_broken_line(self.path)
            except OddFile as error:
                raise not_writable("the list of quarantined samples", error) from error
            except OSError as error:
                log.warning("nanproof: %s is not repaired: %s", self.path, error.strerror)
            self.refresh()

    def __iter__(self) -> Iterator[Entry]:
        return iter(tuple(self._entries))

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entries: Iterable[Entry]) -> None:
        """Entries that are there already are not written again."""
        new = [entry for entry in dict.fromkeys(entries) if self._take(entry)]
        if self.path is not None and new:
            self._unwritten += new
            self._flush()

    def _flush(self) -> None:
        """Write what did not reach the disk yet."""
        assert self.path is not None
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle = open_append(self.path)
            try:
                while self._unwritten:
                    self._append(handle, json.dumps(asdict(self._unwritten[0]), allow_nan=False))
                    del self._unwritten[0]
                os.fsync(handle)
            finally:
                os.close(handle)
        except OSError as error:
            log.warning(
                "nanproof: %s was not written: %s. Its samples are left out in this run, and the next attempt is made with the "
                "next sample or epoch",
                self.path,
                error.strerror,
            )

    def _append(self, handle: int, text: str) -> None:
        """Write a line, or nothing of it."""
        start, torn, written = os.fstat(handle).st_size, self._torn, 0
        data = (("\n" if torn else "") + text + "\n").encode()
        try:
            while written < len(data):  # a disk that fills up takes a part first, and gives its reason with the next call
                written += os.write(handle, data[written:])
            self._torn = False
        except OSError:
            self._torn = torn or written > 0
            if written and os.fstat(handle).st_size == start + written:  # nobody else has written since
                os.ftruncate(handle, start)
                self._torn = torn
            raise

    def refresh(self) -> None:
        """Read what other processes appended, and write what did not reach the disk before."""
        if self.path is None:
            return
        if self._unwritten:
            self._flush()
        try:
            with open_regular(self.path) as file:
                file.seek(self._read_to)
                text = file.read(MOST_BYTES + 1)
        except FileNotFoundError:
            return
        except OSError as error:
            log.warning("nanproof: %s cannot be read: %s. Its samples are not left out", self.path, error.strerror)
            return
        if len(text) > MOST_BYTES:
            log.warning("nanproof: %s has more than %d bytes, of which the rest is not read", self.path, MOST_BYTES)
            text = text[:MOST_BYTES]
        whole = text[: text.rfind(b"\n") + 1]  # somebody may be in the middle of a line
        self._read_to += len(whole)
        bad = 0
        for line in whole.splitlines():
            entry = _entry(line)
            if entry is not None:
                self._take(entry)
            elif line.strip():
                bad += 1
        if bad:
            log.warning("nanproof: %d line(s) of %s are no quarantine entries and are passed over", bad, self.path)

    def leaves_out(self, size: int | None) -> frozenset[int]:
        """The places that a map-style dataset of this length leaves out.

        An entry written for another length is not used: places shift when data comes or goes, so it would hit an innocent
        sample. A warning says how many there are.
        """
        if size is None:  # a dataset that does not know its length
            plain = (entry for entry in self._entries if entry.size is None and entry.workers is None)
            return frozenset(entry.index for entry in plain if entry.index is not None)
        here = [entry for entry in self._entries if entry.size is not None and entry.index is not None]
        foreign = sum(entry.size != size for entry in here)
        if foreign and (size, foreign) not in self._foreign:
            self._foreign.add((size, foreign))
            log.warning(
                "nanproof: %d quarantined sample(s) were written for a dataset of another length than %d and are not left out. "
                "Move %s away if the data was replaced",
                foreign,
                size,
                self.path or "the old entries",
            )
        return frozenset(entry.index for entry in here if entry.size == size and entry.index is not None)

    def stream_filter(self) -> StreamFilter:
        """What an iterable dataset leaves out: by hash where there is one, else by place."""
        here = [entry for entry in self._entries if entry.size is None]
        return StreamFilter(
            frozenset(e.hash for e in here if e.hash is not None),
            frozenset((e.worker, e.workers, e.index) for e in here if e.hash is None and e.index is not None),
        )

    def _take(self, entry: Entry) -> bool:
        if entry.what in self._known:
            return False
        self._known.add(entry.what)
        self._entries.append(entry)
        return True


_NUMBERS = ("index", "size", "worker", "workers")
_TEXTS = ("hash", "bundle")


def _entry(line: bytes) -> Entry | None:
    """Fields that a later version added are ignored; a value of the wrong kind spoils the line."""
    try:
        data = parse_json(line) if len(line) <= LONGEST_LINE else None
        if not isinstance(data, dict):
            return None
        known: dict[str, Any] = {field.name: data.get(field.name) for field in fields(Entry)}
        entry = Entry(**known)
    except (ValueError, TypeError):
        return None
    right = isinstance(entry.step, int) and isinstance(entry.cause, str) and isinstance(entry.at, str)
    right = right and all(_is(getattr(entry, name), int) for name in _NUMBERS)
    return entry if right and all(_is(getattr(entry, name), str) for name in _TEXTS) else None


def _is(value: Any, kind: type) -> bool:
    return value is None or (isinstance(value, kind) and not isinstance(value, bool))
