"""What was appended to the files of a run since the last time, while it is being written: lines, parts of lines, and blocks."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from nanproof._access import open_regular, parse_json, whole_lines
from nanproof._records import NOT_A_RECORD
from nanproof.files._blocks import HEADER, NORMS, STEP, Block, BlockReader, unpacked_columns
from nanproof.files._parts import STEPS, THINNED, earlier, number_of, part_lines

_ACTIONS = 50
"""Kinds of action that steps are counted by."""


class Tail:
    """Reads the lines that were appended to a file since the last time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._file: int | None = None

    def replaced(self) -> bool:
        """Whether there is another file in its place, or less in it than was read."""
        try:
            found = self._path.stat()
        except OSError:
            return False
        before, self._file = self._file, found.st_ino
        return (before is not None and before != found.st_ino) or found.st_size < self._offset

    def lines(self, most: int) -> Iterator[Any]:
        """Whole lines as data; None for one that is not JSON. Stops after about `most` bytes."""
        with suppress(OSError), open_regular(self._path) as file:
            yield from self._rest(file, most)

    def _rest(self, file: BinaryIO, most: int) -> Iterator[Any]:
        end = self._offset + most
        file.seek(self._offset)
        for text in whole_lines(file):
            self._offset = file.tell()
            yield _json(text)
            if self._offset >= end:
                return


class StepTail(Tail):
    """The same for `steps.jsonl`, which goes on in another file from time to time, while the one that was read so far becomes an
    earlier part."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / STEPS)
        self._folder = folder
        self._part = 0
        """The part that is being read; 0 before the first."""
        self._away = False
        """Whether what was read of it was in an earlier part."""
        self._seen: Counter[str] = Counter()
        """How many steps of each action were read of it before that."""
        self._time = 0.0
        """Of the newest line."""

    def replaced(self) -> bool:
        """Whether the run was written anew, which is not the same as that its next part was begun."""
        changed, part = super().replaced(), self._part
        with suppress(OSError), open_regular(self._path) as file:
            part = number_of(file)
        return part < self._part or (changed and part == self._part)

    def lines(self, most: int) -> Iterator[Any]:
        """Whole lines of all parts, as data."""
        with suppress(OSError), open_regular(self._path) as file:
            part = number_of(file)
            for number, path in earlier(self._folder, part):
                if number < self._part:
                    continue
                if number > self._part:
                    self._begin(number)
                start = self._offset
                yield from self._of_part(path, most)
                most -= self._offset - start
                if most <= 0:
                    return
                self._begin(number + 1)
            if part > self._part:
                self._begin(part)
            for data in self._rest(file, most):
                self._note(data)
                if (action := _action(data)) and (action in self._seen or len(self._seen) < _ACTIONS):
                    self._seen[action] += 1
                yield data

    def _begin(self, part: int) -> None:
        self._part, self._offset, self._away = part, 0, False
        self._seen.clear()

    def _of_part(self, path: Path, most: int) -> Iterator[Any]:
        """The rest of an earlier part. One that was thinned since it was read so far is shorter: of it, what is newer."""
        start, thinned = self._offset, False
        for text, _ in part_lines(path):
            thinned = text.startswith(THINNED)
            break
        shorter = thinned and start > 0 and not self._away
        self._away = True
        if shorter:
            yield from self._newer(path)
            return
        for text, offset in part_lines(path, start):
            data = _json(text)
            self._note(data)
            yield data
            self._offset = offset
            if offset - start >= most:
                return

    def _newer(self, path: Path) -> Iterator[Any]:
        newer, left_out = self._time, None
        for text, offset in part_lines(path):
            self._offset = offset
            data = _json(text)
            moment = _time(data)
            if text.startswith(THINNED):
                left_out = data
            elif moment is not None and moment > newer:
                self._note(data)
                yield data
            elif action := _action(data):
                self._seen[action] -= 1
        if isinstance(left_out, dict) and isinstance(counts := left_out.get("left_out"), dict):
            # of those that are left out, some were read when they were there
            fewer = {a: max(0, n - self._seen[a]) if isinstance(n, int) else n for a, n in counts.items()}
            yield {**left_out, "left_out": fewer}

    def _note(self, data: Any) -> None:
        self._time = max(self._time, _time(data) or 0.0)


class BlockTail:
    """Reads the steps that were added to `norms.bin` since the last time. Thinning puts another file in its place, with some of
    the same blocks."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NORMS
        self._reader = BlockReader()
        self._file: int | None = None
        self._number = -1
        """Of the newest block."""

    @property
    def damaged(self) -> int:
        """Blocks that cannot be read."""
        return self._reader.damaged

    def steps(self, most: int) -> Iterator[tuple[Block, tuple[str, ...], tuple[str, ...], dict[str, Any]]]:
        """Each step with names, sites and columns. Stops after about `most` bytes."""
        with suppress(OSError), open_regular(self._path) as file:
            found = os.fstat(file.fileno())
            if found.st_ino != self._file or found.st_size < self._reader.offset:
                self._reader, self._file = BlockReader(), found.st_ino
            for block, payload in self._reader.blocks(file, most):
                if block.kind == HEADER:
                    self._reader.take_header(block, payload)
                elif block.kind == STEP and block.number > self._number:
                    self._number = block.number
                    try:
                        yield block, *self._reader.names_of(block), unpacked_columns(payload)
                    except NOT_A_RECORD:
                        continue


def _action(data: Any) -> str:
    found = data.get("action") if isinstance(data, dict) and data.get("kind") == "step" else ""
    return found if isinstance(found, str) and len(found) <= 40 else ""


def _time(data: Any) -> float | None:
    moment = data.get("time") if isinstance(data, dict) else None
    return float(moment) if isinstance(moment, (int, float)) and abs(moment) < 1 << 53 else None


def _json(text: bytes) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None
