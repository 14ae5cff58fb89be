"""Measuring numbers at the speed of memory: NaN, Inf, extremes, and nothing else unless something is wrong.

`torch.aminmax` costs as much as reading, and both of its results are NaN where anything is NaN, and infinite where anything is.
So healthy numbers are read once; only a block in which that shows is counted. Files are read in blocks into one small buffer a
thread. Mapping them would be faster still, but a disk that fails, or a file that shrinks, would then be the death of the process
instead of an error; and memory would seem to grow with the file.
"""

from __future__ import annotations

import errno
import functools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

BLOCK = 4 << 20
"""Bytes looked at together: small enough to be still in the cache after they were read."""
JOB = 32 << 20
"""Bytes a thread takes at a time."""
LARGE = 1 << 30
"""Bytes from which on it is worth asking the file system which of them were never written."""
MOST_PARTS = 10_000
MOST_WORKERS = 8
"""More threads than this only wait for memory."""


@dataclass(frozen=True, slots=True)
class Measure:
    """What is known about some numbers. Complex numbers count as two."""

    count: int = 0
    nan: int = 0
    posinf: int = 0
    neginf: int = 0
    low: float = math.inf
    """The smallest finite number; infinite if there is none."""
    high: float = -math.inf
    denormals: int = 0

    def __add__(self, other: Measure) -> Measure:
        return Measure(
            self.count + other.count,
            self.nan + other.nan,
            self.posinf + other.posinf,
            self.neginf + other.neginf,
            min(self.low, other.low),
            max(self.high, other.high),
            self.denormals + other.denormals,
        )

    def times(self, repeats: int) -> Measure:
        """The same numbers, shown several times."""
        if repeats == 1:
            return self
        counts = {name: getattr(self, name) * repeats for name in ("count", "nan", "posinf", "neginf", "denormals")}
        return replace(self, **counts)

    @property
    def bad(self) -> bool:
        return bool(self.nan or self.posinf or self.neginf)


def has_fractions(dtype: torch.dtype) -> bool:
    """Whether numbers of this type can be NaN or Inf and can be measured; whole numbers and four-bit floats cannot."""
    return (dtype.is_floating_point or dtype.is_complex) and not str(dtype).startswith("torch.float4")


def measure(numbers: Tensor, denormals: bool = False) -> Measure:
    """Measure a tensor that has at least one element, of any strides."""
    if numbers.dtype.is_complex:
        numbers = torch.view_as_real(numbers.resolve_conj())
    tiny = torch.finfo(numbers.dtype).smallest_normal if denormals else 0.0
    if numbers.element_size() == 1:
        low, high = _byte_extremes(numbers)
        if denormals or not (math.isfinite(low) and math.isfinite(high)):
            numbers = numbers.float()
    else:
        least, most = torch.aminmax(numbers)
        low, high = least.item(), most.item()
    nan = posinf = neginf = 0
    if not (math.isfinite(low) and math.isfinite(high)):
        nan, posinf, neginf = (
            int(torch.count_nonzero(bad)) for bad in (numbers.isnan(), numbers == math.inf, numbers == -math.inf)
        )
        finite = numbers.abs() < math.inf  # one pass less than isfinite()
        low, high = torch.where(finite, numbers, math.inf).amin().item(), torch.where(finite, numbers, -math.inf).amax().item()
    small = int(torch.count_nonzero((numbers != 0) & (numbers.abs() < tiny))) if denormals else 0
    return Measure(numbers.numel(), nan, posinf, neginf, low, high, small)


def _byte_extremes(numbers: Tensor) -> tuple[float, float]:
    """aminmax of eight-bit floats, which torch lacks. As codes, larger means farther from zero on either side of it.

    Read as signed bytes, the largest is the largest positive number; as unsigned bytes, the most negative one. NaN and Inf are
    the largest codes of their side, or (in the fnuz types) the smallest signed one; so they always show. e8m0 has one side.
    """
    seen = []
    for kind in (torch.int8, torch.uint8):
        least, most = torch.aminmax(numbers.view(kind))
        seen += [int(least), int(most)]
    values = [_decode(numbers.dtype)[code & 255] for code in seen]
    return (math.nan, math.nan) if any(map(math.isnan, values)) else (min(values), max(values))


@functools.cache
def _decode(dtype: torch.dtype) -> list[float]:
    values: list[float] = torch.arange(256, dtype=torch.uint8).view(dtype).float().tolist()
    return values


@dataclass(frozen=True, slots=True)
class FileSpan:
    """Numbers that lie one after the other in a file."""

    path: Path
    offset: int
    size: int
    dtype: torch.dtype

    def parts(self) -> Iterator[FileSpan]:
        """Pieces of at most one job."""
        for start in range(0, self.size, JOB):
            yield FileSpan(self.path, self.offset + start, min(JOB, self.size - start), self.dtype)


def without_holes(span: FileSpan) -> tuple[list[FileSpan], int]:
    """The parts of a large span that were ever written, and how many bytes were not: a file system gives them out as zeros, at
    the price of reading. A file of a terabyte may have been made in a moment."""
    if span.size < LARGE or not hasattr(os, "SEEK_DATA"):
        return [span], 0
    found: list[FileSpan] = []
    at, end, each = span.offset, span.offset + span.size, span.dtype.itemsize
    with open(span.path, "rb", buffering=0) as file:
        while at < end and len(found) < MOST_PARTS:
            try:
                data = os.lseek(file.fileno(), at, os.SEEK_DATA)
                hole = os.lseek(file.fileno(), data, os.SEEK_HOLE)
            except OSError as error:
                if error.errno != errno.ENXIO:  # a file system that does not know
                    return [span], 0
                at = end  # there is only a hole left
                break
            if data >= end:
                at = end
                break
            start = max(at, span.offset + (data - span.offset) // each * each)  # numbers are read whole
            stop = min(end, span.offset + -(-(hole - span.offset) // each) * each)
            found.append(FileSpan(span.path, start, stop - start, span.dtype))
            at = stop
    if at < end:
        found.append(FileSpan(span.path, at, end - at, span.dtype))
    return found, span.size - sum(part.size for part in found)


def _zeros(dtype: torch.dtype, size: int) -> Measure:
    """What is known about so many bytes of zeros."""
    value = measure(torch.zeros(dtype.itemsize, dtype=torch.uint8).view(dtype))
    return Measure(value.count * (size // dtype.itemsize), low=value.low, high=value.high)


class Buffers(threading.local):
    """One buffer a thread."""

    def __init__(self) -> None:
        self.bytes = bytearray(BLOCK)
        self.tensor = torch.frombuffer(self.bytes, dtype=torch.uint8)
        self.view = memoryview(self.bytes)


def file_blocks(span: FileSpan, file: FileIO, buffers: Buffers) -> Iterator[Tensor]:
    """The numbers of a span, block by block, each valid until the next is asked for."""
    file.seek(span.offset)
    done = 0
    while done < span.size:
        want = min(BLOCK, span.size - done)
        have = 0
        while have < want:
            got = file.readinto(buffers.view[have:want])
            if not got:
                raise EOFError(f"the file ends {span.size - done - have} bytes early")
            have += got
        yield buffers.tensor[:want].view(span.dtype)
        done += want


def tensor_blocks(tensor: Tensor) -> Iterator[Tensor]:
    """A tensor of any strides in pieces of at most a block, without copying it."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda d: -strides[d])
    tensor = tensor.permute(order)
    most = max(1, BLOCK // tensor.element_size())
    if tensor.is_contiguous():
        yield from tensor.reshape(-1).split(most)
    elif tensor.numel() <= most:
        yield tensor
    else:
        rows = most * tensor.shape[0] // tensor.numel()
        for part in tensor.split(max(1, rows)):
            yield from (part,) if rows else tensor_blocks(part[0])


def distinct(tensor: Tensor) -> tuple[Tensor, int]:
    """A tensor without the dimensions along which it shows the same numbers again, and how often it shows them."""
    repeats = 1
    for d in range(tensor.dim()):
        if tensor.stride(d) == 0 and tensor.shape[d] > 1:
            repeats *= tensor.shape[d]
            tensor = tensor.narrow(d, 0, 1)
    held = tensor.untyped_storage().nbytes() // tensor.element_size() - tensor.storage_offset()
    if tensor.numel() > held:  # a view that overlaps itself in another way; what it shows is counted once
        tensor = tensor.as_strided((held,), (1,))
    return tensor, repeats


Job = Callable[[], list[tuple[int, Measure]]]


class Workers:
    """Threads that measure. torch lets go of the interpreter while it reads, so they run side by side, each on one core."""

    def __init__(self, denormals: bool = False) -> None:
        self._denormals = denormals
        self._buffers = Buffers()
        self._threads_before = torch.get_num_threads()
        count = min(MOST_WORKERS, _cores())
        self._pool = ThreadPoolExecutor(count, "nanproof-scan", initializer=torch.set_num_threads, initargs=(1,))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        torch.set_num_threads(self._threads_before)

    def map(self, function: Callable[[Path], str], paths: Iterable[Path]) -> Iterator[str]:
        return self._pool.map(function, paths)

    def measure(self, tensors: Sequence[Sequence[FileSpan] | Tensor]) -> list[Measure]:
        """Measure every one of them: a tensor in memory, or the spans of files that it consists of."""
        totals = [Measure()] * len(tensors)
        for found in self._pool.map(lambda job: job(), self._jobs(tensors)):
            for index, part in found:
                totals[index] += part
        return totals

    def _jobs(self, tensors: Sequence[Sequence[FileSpan] | Tensor]) -> Iterator[Job]:
        """Large tensors in parts, small neighbours together."""
        waiting: list[tuple[int, FileSpan]] = []
        size = 0
        for index, tensor in enumerate(tensors):
            if isinstance(tensor, Tensor):
                yield from self._tensor_jobs(index, tensor)
                continue
            spans = []
            for span in tensor:
                written, left_out = without_holes(span)
                spans += written
                if left_out:
                    yield functools.partial(list, [(index, _zeros(span.dtype, left_out))])
            for part in (part for span in spans for part in span.parts()):
                if waiting and (size + part.size > JOB or waiting[0][1].path != part.path):
                    yield self._file_job(waiting)
                    waiting, size = [], 0
                waiting.append((index, part))
                size += part.size
        if waiting:
            yield self._file_job(waiting)

    def _file_job(self, parts: list[tuple[int, FileSpan]]) -> Job:
        def run() -> list[tuple[int, Measure]]:
            found = []
            with open(parts[0][1].path, "rb", buffering=0) as file:
                for index, part in parts:
                    found += [(index, measure(block, self._denormals)) for block in file_blocks(part, file, self._buffers)]
            return found

        return run

    def _tensor_jobs(self, index: int, tensor: Tensor) -> Iterator[Job]:
        tensor, repeats = distinct(tensor.detach())
        blocks: list[Tensor] = []

        def job(blocks: list[Tensor]) -> Job:
            return lambda: [(index, measure(block, self._denormals).times(repeats)) for block in blocks]

        for block in tensor_blocks(tensor) if tensor.numel() else ():
            blocks.append(block)
            if len(blocks) == JOB // BLOCK:
                yield job(blocks)
                blocks = []
        if blocks:
            yield job(blocks)


def _cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
