"""Scan: is there a NaN or an Inf in these checkpoints, where, and which checkpoint was the last good one?

One pass over the bytes, nothing executed, little memory. What cannot be read is reported and the rest is still scanned.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nanproof._access import read_json
from nanproof._errors import NanproofError, RefusedFile, UsageError
from nanproof._text import one_line
from nanproof.scan._formats import Stored, in_memory, read_file
from nanproof.scan._found import INDEX, SUFFIXES, Found, checkpoints, holds_no_weights, is_file, shards
from nanproof.scan._inside import METADATA, UnreadableFile, first_line, path_inside
from nanproof.scan._manifest import MANIFEST, crc32
from nanproof.scan._measure import FileSpan, Measure, Workers, distinct, measure
from nanproof.scan._report import CheckpointReport, FileReport, ScanReport, Status, TensorReport

Progress = Callable[[FileReport], None]
MOST_WRONG = 20
"""Faults of one index that are listed."""
MOST_TIMES = 64
"""How often the numbers of a file may be shown by its tensors. Views and tied weights show some twice."""


def scan(
    paths: Iterable[str | Path], *, denormals: bool = False, checksums: bool = False, progress: Progress | None = None
) -> ScanReport:
    """Look at every tensor under the paths: files, checkpoint folders, or folders of checkpoints.

    `denormals` counts them as well, which takes several times as long. `checksums` adds the crc32 of every file, and compares
    it with the manifest.json of nanproof's own checkpoints. `progress` is called with the report of each file.
    """
    started = time.perf_counter()
    found, missing = [], []
    for path in map(Path, paths):
        try:
            found += _found(path)
        except UsageError as error:
            missing.append((path, error))
    if missing and not found:
        raise missing[0][1]
    with Workers(denormals) as workers:
        reports = [_Scanner(workers, denormals, checksums, progress).checkpoint(one) for one in found]
    for path, why in missing:  # beside others that can be read
        reports.append(CheckpointReport(path, path, None, (FileReport(path, "unreadable", str(why)),), None))
    return ScanReport(tuple(reports), time.perf_counter() - started)


def _found(path: Path) -> list[Found]:
    if not path.exists():
        raise UsageError(f"{path} does not exist. Give files, or folders with checkpoints in them")
    try:
        found = checkpoints(path)
    except OSError as error:
        raise UsageError(f"{error.filename or path} cannot be read: {error.strerror}. See to its permissions") from error
    except RecursionError:
        raise UsageError(f"{path} holds folders in folders without end. Name those with the checkpoints") from None
    if not found:
        raise UsageError(f"{path} holds no checkpoint: no folder of dcp.save, and no file that ends in {', '.join(SUFFIXES)}")
    return found


def first_bad(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """The name of the first tensor in memory that holds a NaN or an Inf; waits for the device once a tensor."""
    for name, tensor in named:
        numbers = in_memory(name, tensor).where
        if isinstance(numbers, Tensor) and numbers.numel() and measure(numbers).bad:
            return name
    return None


class _Scanner:
    def __init__(self, workers: Workers, denormals: bool, checksums: bool, progress: Progress | None) -> None:
        self._workers, self._denormals, self._checksums = workers, denormals, checksums
        self._progress = progress or (lambda report: None)
        self._names: dict[Path, set[str]] = {}
        """The tensors of each file that was read, for the index that names them."""

    def checkpoint(self, found: Found) -> CheckpointReport:
        reports: list[FileReport] = []

        def add(report: FileReport) -> None:
            reports.append(report)
            self._progress(report)

        for unit in found.units:
            if unit.name.endswith(INDEX):
                self._index(unit, add)
            elif unit.is_dir():
                self._dcp(unit, add)
            elif not any(report.path == unit for report in reports):  # an index may have named it
                add(self._file(unit, beside_others=unit != found.path))
        checksums = None
        if self._checksums:
            files = sorted({file for report in reports for file in _files_of(report.path)})
            checksums = dict(zip(files, self._workers.map(crc32, files), strict=True))
        for folder in sorted({unit if unit.is_dir() else unit.parent for unit in found.units}):
            if is_file(folder / MANIFEST) and found.path.is_dir():
                for report in _against_manifest(folder, checksums):
                    add(report)
        return CheckpointReport(found.root, found.path, found.step, tuple(reports), checksums)

    def _file(self, path: Path, beside_others: bool) -> FileReport:
        started = time.perf_counter()
        try:
            return self._measured(path, read_file(path), started)
        except (NanproofError, OSError, EOFError) as error:
            report = _failed(path, error)
            if report.status == "refused" and beside_others and holds_no_weights(path):
                return FileReport(path, "skipped", "it holds no weights, and reading it could execute code")
            return report

    def _index(self, index: Path, add: Progress) -> None:
        try:
            named = shards(index)
        except NanproofError as error:
            add(_failed(index, error))
            return
        wrong: list[str] = []
        expected: dict[Path, set[str]] = {}
        for tensor, place in named.items():
            expected.setdefault(place, set()).add(tensor)
        for path, tensors in sorted(expected.items()):
            if not path.is_file():
                wrong.append(f"{path.name} is missing")
                continue
            if path not in self._names:
                add(self._file(path, beside_others=True))
            lacking = tensors - self._names.get(path, set())
            if path in self._names and lacking:
                wrong.append(f"{path.name} lacks {min(lacking)[:200]!r}, one of {len(lacking)} tensors it should have")
        if wrong:
            more = [f"and {len(wrong) - MOST_WRONG} more"] if len(wrong) > MOST_WRONG else []
            add(FileReport(index, "unreadable", "; ".join(wrong[:MOST_WRONG] + more)))

    def _dcp(self, folder: Path, add: Progress) -> None:
        from nanproof.scan._chunks import read_dcp

        started = time.perf_counter()
        try:
            stored = read_dcp(folder, lambda path, why: add(FileReport(path, "unreadable", why)))
            add(self._measured(folder, stored, started))
        except (NanproofError, OSError, EOFError) as error:
            add(_failed(folder, error))

    def _measured(self, path: Path, stored: Sequence[Stored], started: float) -> FileReport:
        self._names[path] = {tensor.name for tensor in stored}
        fractions = [tensor for tensor in stored if tensor.where is not None]
        places: dict[Any, int] = {}
        for tensor in fractions:  # tied weights are read once
            places.setdefault(_place(tensor), len(places))
        wheres = {places[_place(tensor)]: tensor.where for tensor in fractions}
        size = sum(_bytes(where) for where in wheres.values())
        if size > MOST_TIMES * max(1 << 20, sum(file.stat().st_size for file in _files_of(path))):
            raise UnreadableFile(f"its tensors show the same numbers again and again, {size} bytes in all")
        measures = self._workers.measure([wheres[n] for n in range(len(places))])  # type: ignore[misc]
        tensors = tuple(self._told(tensor, measures[places[_place(tensor)]]) for tensor in fractions)
        status: Status = "bad" if any(tensor.bad for tensor in tensors) else "clean"
        seconds = time.perf_counter() - started
        return FileReport(path, status, "", tensors, len(stored) - len(fractions), size, seconds)

    def _told(self, tensor: Stored, found: Measure) -> TensorReport:
        low, high = (value if math.isfinite(value) else None for value in (found.low, found.high))
        return TensorReport(
            tensor.name,
            tensor.dtype,
            tensor.shape,
            found.nan,
            found.posinf,
            found.neginf,
            low,
            high,
            found.denormals if self._denormals else None,
            _excuse(tensor, found) if found.bad else None,
        )


def _excuse(tensor: Stored, found: Measure) -> str | None:
    """Two places in which Inf is no fault: the causal masks of attention, and the scores that Lightning's callbacks keep."""
    if tensor.name.startswith("callbacks.") and tensor.shape == ():
        return "a score that a callback keeps"
    side = tensor.shape[-1] if len(tensor.shape) >= 2 and tensor.shape[-1] == tensor.shape[-2] else 0
    triangles = found.count // (side * side) * (side * (side - 1) // 2) if side else 0
    if triangles and found.neginf == triangles and found.low == found.high == 0 and not (found.nan or found.posinf):
        return "a causal mask"
    return None


def _place(tensor: Stored) -> Any:
    where = tensor.where
    if isinstance(where, Tensor):
        return where.data_ptr(), where.shape, where.stride(), where.dtype
    return where


def _bytes(where: Sequence[FileSpan] | Tensor | None) -> int:
    """What there is to look at. A tensor may show one number a billion times."""
    return distinct(where)[0].nbytes if isinstance(where, Tensor) else sum(span.size for span in where or ())


def _failed(path: Path, error: Exception) -> FileReport:
    if isinstance(error, RefusedFile):
        return FileReport(path, "refused", error.why)
    said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return FileReport(path, "unreadable", said)


def _files_of(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path] if path.is_file() else []
    return sorted(file for file in path.iterdir() if file.is_file() and (file.name == METADATA or file.suffix == ".distcp"))


def _against_manifest(folder: Path, checksums: dict[Path, str] | None) -> list[FileReport]:
    """What of a manifest.json does not hold: files that are missing, of another size, or of another content."""
    manifest = folder / MANIFEST
    try:
        files = read_json(manifest)["files"]
        entries = [(path_inside(folder, name, manifest), entry["bytes"], entry.get("crc32")) for name, entry in files.items()]
    except RefusedFile as error:
        return [_failed(manifest, error)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [FileReport(manifest, "unreadable", f"no list of files ({first_line(error)})")]
    wrong = []
    for path, size, digits in entries:
        if not path.is_file():
            wrong.append(FileReport(path, "unreadable", "missing, though manifest.json names it"))
        elif (have := path.stat().st_size) != size:
            wrong.append(FileReport(path, "unreadable", f"{have} bytes, and manifest.json says {one_line(size, 40)}"))
        elif checksums is not None and digits is not None:
            found = checksums[path] = checksums.get(path) or crc32(path)
            if found != digits:
                said = one_line(digits, 40)
                wrong.append(FileReport(path, "unreadable", f"crc32 {found}, and manifest.json says {said}: it was changed"))
    return wrong
