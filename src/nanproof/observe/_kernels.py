"""Statistics of many tensors in one launch, on CUDA: a Triton kernel for light looks, and one for full ones.

Launching costs the host more than reading an output costs the device, so outputs wait for each other: until there are 64 of
them, until they hold too much memory, or until the last one of a forward. One that is written in place meanwhile is not what
the module returned any more: it is left out, and its site looked at at once from then on.

A light look reads words of 4 bytes, whatever the dtype, and compares bits without sign, which are in the order of the numbers,
with Inf above them and NaN above Inf. So tensors of several dtypes go into one launch, and the largest value of each site is an
atomic maximum of integers: it does not depend on the order.

Every program of a full look keeps its part of the sums in a place of its own: there are no atomics, the result does not depend
on the order, and a second call of the same site adds to it. One small launch a step puts the parts together. Whether a look is
light or full is read from device memory, so a captured graph follows it. How many values are NaN, Inf or near the maximum is
counted in a second pass that ordinary tensors do not take.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped, misc"
from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import accumulate
from operator import or_
from typing import Any

import torch
from torch import Tensor

from nanproof._records import ABSENT
from nanproof.core._telemetry import Courier
from nanproof.core.judge._parameters import fills_its_memory, local
from nanproof.observe._tables import NEAR, PlainTable, Seen, Table

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

log = logging.getLogger("nanproof")

TOGETHER = 64
"""Tensors in one launch."""
KEPT = 8
"""Plans, and tables of addresses of each."""
HELD = 128
"""Outputs that wait hold at most this part of the device's memory."""
PROGRAMS = 256
"""Programs for one tensor, at the most."""
BLOCK, WARPS = 4096, 4
WIDTH = 8
"""Numbers a program keeps: the columns, and the squares of values above 2^48, scaled down so that they do not overflow."""

CHUNK = 32768
"""Words of 4 bytes that a program of a light look reads."""

if triton is not None:

    @triton.jit
    def _largest(
        waiting, tops, ALIGNED: tl.constexpr, TOGETHER: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        """The largest absolute value of each of many tensors. `tops` are float32 as integers, less than 0 at first."""
        chunk = tl.program_id(0)
        starts = waiting + 3 * TOGETHER
        tensor = tl.sum((tl.load(starts + tl.arange(0, TOGETHER)) <= chunk).to(tl.int32)) - 1
        address, size = tl.load(waiting + tensor), tl.load(waiting + TOGETHER + tensor)
        place = tl.load(waiting + 2 * TOGETHER + tensor)
        row, kind = place // 4, place % 4
        first = (chunk - tl.load(starts + tensor)) * CHUNK
        words = tl.where(kind == 0, size, size // 2)
        if ALIGNED:
            address = tl.multiple_of(address, 16)
            words = tl.multiple_of(words, 4)
        x = address.to(tl.pointer_type(tl.int32))
        top = tl.zeros((BLOCK,), tl.int32)
        if kind == 0:
            for offset in range(0, CHUNK, BLOCK):
                i = first + offset + tl.arange(0, BLOCK)
                top = tl.maximum(top, tl.load(x + i, mask=i < words, other=0) & 0x7FFFFFFF)
            largest = tl.max(top)
        else:  # two numbers a word; of an odd number of them the last one is alone
            low = tl.zeros((BLOCK,), tl.int32)
            for offset in range(0, CHUNK, BLOCK):
                i = first + offset + tl.arange(0, BLOCK)
                two = tl.load(x + i, mask=i < words, other=0)
                top = tl.maximum(top, two & 0x7FFF0000)
                low = tl.maximum(low, two & 0x7FFF)
            last = tl.load(address.to(tl.pointer_type(tl.int16)) + size - 1).to(tl.int32) & 0x7FFF
            half = tl.maximum(tl.maximum(tl.max(top) >> 16, tl.max(low)), last)
            largest = half << 16
            if kind == 2:
                largest = half.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        tl.atomic_max(tops + row, largest)

    @triton.jit
    def _look(
        waiting, full, table, near, odd, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, TOGETHER: tl.constexpr,
        PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    ):  # fmt: skip
        tensor, program = tl.program_id(1), tl.program_id(0)
        x = tl.load(waiting + tensor).to(tl.pointer_type(DTYPE))
        size = tl.load(waiting + TOGETHER + tensor)
        row = tl.load(waiting + 2 * TOGETHER + tensor)
        if ALIGNED:
            x = tl.multiple_of(x, 16)
            size = tl.multiple_of(size, 16)
        first, stride = program.to(tl.int64) * BLOCK, tl.num_programs(0).to(tl.int64) * BLOCK
        place = table + (row * PROGRAMS + program) * WIDTH
        top = tl.zeros((BLOCK,), tl.int32)
        if tl.load(full) == 0:
            for start in range(first, size, stride):
                i = start + tl.arange(0, BLOCK)
                value = tl.load(x + i, mask=i < size, other=0.0).to(tl.float32)
                top = tl.maximum(top, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
            largest = tl.max(top)
        else:
            squares, others = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.int32)
            for start in range(first, size, stride):
                i = start + tl.arange(0, BLOCK)
                value = tl.load(x + i, mask=i < size, other=0.0).to(tl.float32)
                bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
                top = tl.maximum(top, bits)
                squares += value * value
                others += (bits != 0).to(tl.int32)
            largest, seen, nonzero = tl.max(top), tl.sum(squares), tl.sum(others)
            if largest >= odd:  # values near the maximum, squares that overflow (from 2^48 on), Inf, NaN
                small, large = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
                nans, infs, nears = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
                for start in range(first, size, stride):
                    i = start + tl.arange(0, BLOCK)
                    value = tl.load(x + i, mask=i < size, other=0.0).to(tl.float32)
                    bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
                    big = bits >= 0x57800000
                    below, above = tl.where(big, 0.0, value), tl.where(big, value, 0.0) * 8.271806125530277e-25  # 2^-80
                    small += below * below
                    large += above * above
                    nans += (bits > 0x7F800000).to(tl.int32)
                    infs += (bits == 0x7F800000).to(tl.int32)
                    nears += ((bits >= near) & (bits < 0x7F800000)).to(tl.int32)
                seen = tl.sum(small)
                tl.store(place + 3, tl.load(place + 3) + tl.sum(nans).to(tl.float32))
                tl.store(place + 4, tl.load(place + 4) + tl.sum(infs).to(tl.float32))
                tl.store(place + 6, tl.load(place + 6) + tl.sum(nears).to(tl.float32))
                tl.store(place + 7, tl.load(place + 7) + tl.sum(large))
            mine = 0
            for start in range(first, size, stride):
                mine += tl.minimum(size - start, BLOCK).to(tl.int32)
            tl.store(place + 2, tl.load(place + 2) + seen)
            tl.store(place + 5, tl.load(place + 5) + (mine - nonzero).to(tl.float32))
        before = tl.load(place).to(tl.int32, bitcast=True)
        tl.store(place, tl.maximum(before, largest).to(tl.float32, bitcast=True))
        if program == 0:
            tl.store(place + 1, tl.load(place + 1) + size.to(tl.float32))

    @triton.jit
    def _gather(table, out, rows, PROGRAMS: tl.constexpr, WIDTH: tl.constexpr):
        """Put the parts of a row together, and leave the table empty."""
        row = tl.program_id(0)
        place = table + (row * PROGRAMS + tl.arange(0, PROGRAMS)) * WIDTH
        top = tl.load(place).to(tl.int32, bitcast=True)
        tl.store(out + row, tl.max(top).to(tl.float32, bitcast=True))
        tl.store(place, 0.0)
        for column in range(1, WIDTH):
            tl.store(out + column * rows + row, tl.sum(tl.load(place + column)))
            tl.store(place + column, 0.0)

    @triton.jit
    def _read(pointers, sizes, out, DTYPE: tl.constexpr, ELEMENTS: tl.constexpr):
        tensor = tl.program_id(0)
        size, i = tl.load(sizes + tensor), tl.arange(0, ELEMENTS)
        place = i.to(tl.int64) * tl.cdiv(size, ELEMENTS)
        x = tl.load(pointers + tensor).to(tl.pointer_type(DTYPE))
        value = tl.load(x + place, mask=place < size, other=0.0)
        tl.store(out + tensor * ELEMENTS + i, value.to(tl.float32))

    _DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    _NEAR = {dtype: int(torch.tensor(torch.finfo(dtype).max / NEAR, dtype=torch.float32).view(torch.int32)) for dtype in _DTYPES}
    """As the bits of a float32: those of positive numbers are in the same order as the numbers."""

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class _Plan:
    """Who reads what in a light look: the same for the same outputs, wherever they are."""

    def __init__(self, rows: Sequence[int], sizes: tuple[int, ...], kinds: tuple[int, ...]) -> None:
        words = [size >> (kind > 0) for size, kind in zip(sizes, kinds, strict=True)]
        starts = [0, *accumulate(max(1, -(-count // CHUNK)) for count in words)]
        filler = [0] * (TOGETHER - len(rows))
        places = [4 * row + kind for row, kind in zip(rows, kinds, strict=True)]
        self.chunks = starts.pop()
        self.rows = (*rows, *kinds)
        self.numbers = [*sizes, *filler, *places, *filler, *starts, *[self.chunks] * len(filler)]
        self.aligned = not any(count % 4 for count in words)
        self.on_device: dict[tuple[int, ...], Tensor] = {}
        """By the addresses of the tensors. They are often the same, step by step."""


class TritonTable:
    """The table on a CUDA device. What the kernels cannot take (float64, another device) goes to a plain one."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows, self._device = rows, device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._table = torch.zeros(rows, PROGRAMS, WIDTH, device=device)
        self._tops = torch.full((rows,), ABSENT, device=device)
        """Of light looks. Its bits as an integer are below those of all positive numbers."""
        self._tops_as_bits = self._tops.view(torch.int32)
        self._mode = torch.zeros(1, dtype=torch.int32, device=device)
        self.dtypes: list[torch.dtype | None] = [None] * rows
        self._full = False
        self._used = self._used_tops = False
        self._captured = False
        """A graph writes to the table whenever it is replayed."""
        self._courier = Courier(device)
        self._plain = PlainTable(rows, device)
        self._used_plain = False
        self._waiting: list[tuple[Tensor, int, int]] = []
        """Tensors that have not been looked at yet, their rows, and how often they had been written."""
        self._bytes = 0
        self._outputs = rows // 2
        self._last = self._latest = -1
        """The last output of the step before, and of this step. It ends a forward: what waits through backward keeps memory."""
        self._plans: dict[Any, _Plan] = {}
        """By rows, sizes and dtypes."""
        self._dtypes_of: tuple[int, ...] = ()
        self._dense: dict[tuple[Any, Any], bool] = {}
        self._most = torch.cuda.get_device_properties(device).total_memory // HELD
        self._written: set[int] = set()
        """Rows whose tensors are written in place before they could be looked at."""

    @property
    def full(self) -> bool:
        return self._full

    @full.setter
    def full(self, full: bool) -> None:
        if full != self._full:
            self._full = self._plain.full = full
            self._mode.fill_(int(full))

    def look(self, x: Tensor, row: int) -> None:
        self._waiting.append((x, row, x._version))
        self._bytes += x.nbytes
        if row < self._outputs:
            self._latest = row
        if row == self._last or len(self._waiting) >= TOGETHER or self._bytes > self._most or row in self._written:
            self.flush()

    def flush(self) -> None:
        """Look at everything that waits."""
        if not self._waiting:
            return
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        tensors: Sequence[Tensor]
        rows: Sequence[int]
        tensors, rows, versions = zip(*waiting, strict=True)
        ordinary = (
            set(map(type, tensors)) == {Tensor}
            and {x.layout for x in tensors} == {torch.strided}
            and {x.device for x in tensors} == {self._device}
            and versions == tuple([x._version for x in tensors])
        )
        kinds = tuple([_KINDS.get(x.dtype, -1) for x in tensors]) if ordinary else (-1,)
        sizes = tuple([x.numel() for x in tensors]) if ordinary else ()
        if -1 in kinds or 0 in sizes:
            kept = [(x, row) for look in waiting if (x := self._readable(*look)) is not None for row in [look[1]]]
            if not kept:
                return
            tensors, rows = zip(*kept, strict=True)
            kinds, sizes = tuple([_KINDS[x.dtype] for x in tensors]), tuple([x.numel() for x in tensors])
        tensors = [x if x.is_contiguous() else self._block(x) for x in tensors]
        if not self._full and not torch.cuda.is_current_stream_capturing():
            self._look_lightly(tensors, rows, sizes, kinds)
            return
        groups: dict[torch.dtype, tuple[list[Tensor], list[int], list[int]]] = {}
        for x, row, size in zip(tensors, rows, sizes, strict=True):
            self.dtypes[row] = x.dtype
            group = groups.setdefault(x.dtype, ([], [], []))
            group[0].append(x)
            group[1].append(size)
            group[2].append(row)
        for dtype, group in groups.items():
            self._look_once(dtype, *group)

    def _readable(self, x: Tensor, row: int, version: int) -> Tensor | None:
        """What the kernels can read of a tensor; None where it was written since, or looked at already."""
        if x._version != version:
            self._written.add(row)
            return None
        x = local(x)
        if x.dtype not in _KINDS or x.device != self._device or x.layout is not torch.strided:
            self._plain.look(x, row)
            self.dtypes[row] = self._plain.dtypes[row]
            self._used_plain = True
            return None
        return x if x.numel() else None

    def _block(self, x: Tensor) -> Tensor:
        """The tensor as one block of memory. In what order its numbers are does not matter."""
        layout = x.shape, x.stride()
        dense = self._dense.get(layout)
        if dense is None:
            if len(self._dense) > 1000:
                self._dense.clear()
            dense = self._dense[layout] = fills_its_memory(x)
        return x if dense else x.detach().contiguous()

    def _look_lightly(self, tensors: list[Tensor], rows: Sequence[int], sizes: tuple[int, ...], kinds: tuple[int, ...]) -> None:
        """One launch, whatever the dtypes."""
        plan = self._plans.get((rows, sizes, kinds))
        if plan is None:
            if len(self._plans) >= KEPT:
                self._plans.clear()
            plan = self._plans[rows, sizes, kinds] = _Plan(rows, sizes, kinds)
        for row, x in () if plan.rows == self._dtypes_of else zip(rows, tensors, strict=True):
            self.dtypes[row] = x.dtype
        self._dtypes_of = plan.rows
        addresses = tuple([x.data_ptr() for x in tensors])
        together = reduce(or_, addresses)
        if together % 4:  # a view that begins between two words
            tensors = [x.detach().clone() if x.data_ptr() % 4 else x for x in tensors]
            addresses = tuple([x.data_ptr() for x in tensors])
        on_device = plan.on_device.get(addresses)
        if on_device is None:
            if len(plan.on_device) >= KEPT:
                plan.on_device.clear()
            filler = [0] * (TOGETHER - len(rows))
            on_device = plan.on_device[addresses] = self._upload([*addresses, *filler, *plan.numbers])
        self._used_tops = True
        aligned = plan.aligned and not together % 16
        with torch.cuda.device(self._device):
            _largest[(plan.chunks,)](on_device, self._tops_as_bits, aligned, TOGETHER, CHUNK, BLOCK, num_warps=8)

    def _upload(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, pin_memory=True).to(self._device, non_blocking=True)

    def _look_once(self, dtype: torch.dtype, tensors: list[Tensor], sizes: list[int], rows: list[int]) -> None:
        """One launch adds to a row once: where a module was called twice, it takes two."""
        start, seen = 0, set[int]()
        for i, row in enumerate(rows):
            if row in seen:
                self._look(dtype, tensors[start:i], sizes[start:i], rows[start:i])
                start, seen = i, set()
            seen.add(row)
        self._look(dtype, tensors[start:], sizes[start:], rows[start:])

    def _look(self, dtype: torch.dtype, tensors: list[Tensor], sizes: list[int], rows: list[int]) -> None:
        self._used = True
        count, pointers = len(rows), [x.data_ptr() for x in tensors]
        aligned = not any(p % 16 for p in pointers) and not any(s % 16 for s in sizes)
        if torch.cuda.is_current_stream_capturing():
            self._captured = True
            # A copy would be repeated from host memory that is gone by then.
            on_device = torch.zeros(3 * TOGETHER, dtype=torch.int64, device=self._device)
            for first, numbers in zip((0, TOGETHER, 2 * TOGETHER), (pointers, sizes, rows), strict=True):
                for i, number in enumerate(numbers):
                    on_device[first + i].fill_(number)
        else:
            filler = [0] * (TOGETHER - count)
            on_device = self._upload([*pointers, *filler, *sizes, *filler, *rows, *filler])
        programs = max(32, min(PROGRAMS, 1056 // count, triton.cdiv(max(sizes), BLOCK)))
        with torch.cuda.device(self._device):
            _look[(programs, count)](
                on_device, self._mode, self._table, _NEAR[dtype], min(_NEAR[dtype], 0x57800000), _DTYPES[dtype], aligned,
                TOGETHER, PROGRAMS, BLOCK, WIDTH, num_warps=WARPS,
            )  # fmt: skip

    def send(self) -> Callable[[], Seen]:
        self.flush()
        self._last = self._latest
        tops, table = self._send_tops(), self._send_table()
        plain = self._plain.send() if self._used_plain else None
        self._used_plain = False

        def read() -> Seen:
            seen = Seen([ABSENT] * self._rows if tops is None else tops())
            for more in (table, plain):
                if more is not None:
                    seen.take(more())
            return seen

        return read

    def _send_tops(self) -> Callable[[], list[float]] | None:
        if not self._used_tops:
            return None
        parcel = self._courier.send(self._tops)
        self._tops.fill_(ABSENT)
        self._used_tops = False
        return parcel

    def _send_table(self) -> Callable[[], Seen] | None:
        if not self._used and not self._captured:
            return None
        self._used = False
        out = torch.empty(WIDTH, self._rows, device=self._device)
        with torch.cuda.device(self._device):
            _gather[(self._rows,)](self._table, out, self._rows, PROGRAMS, WIDTH)
        full = self._full
        parcel = self._courier.send((out if full else out[:2]).flatten())

        def read() -> Seen:
            values, n = parcel(), self._rows
            columns = [values[i : i + n] for i in range(0, len(values), n)]
            seen = Seen([top if count else ABSENT for top, count in zip(columns[0], columns[1], strict=True)])
            if full:
                for row, (*statistics, large) in enumerate(zip(*columns, strict=True)):
                    if statistics[1]:
                        statistics[2] += large * 2.0**160
                        seen.rows[row] = statistics
            return seen

        return read

    def clear(self) -> None:
        if self._used_plain:
            self._plain.clear()
            self._used_plain = False
        self._waiting, self._bytes = [], 0
        if self._used_tops:
            self._tops.fill_(ABSENT)
            self._used_tops = False
        if self._used or self._captured:
            self._table.zero_()
            self._used = False


class ElementReader:
    """A few elements of each of many tensors, spread over it, in one launch. The tensors stay where they are."""

    def __init__(self, tensors: list[Tensor], elements: int) -> None:
        self._elements, self._device, self._dtype = elements, tensors[0].device, tensors[0].dtype
        self._pointers = torch.tensor([t.data_ptr() for t in tensors], device=self._device)
        self._sizes = torch.tensor([t.numel() for t in tensors], device=self._device)

    @staticmethod
    def can_read(tensors: list[Tensor]) -> bool:
        kinds = {(t.device, t.dtype) for t in tensors}
        return triton is not None and len(kinds) == 1 and tensors[0].is_cuda and tensors[0].dtype in _DTYPES

    def read(self, out: Tensor) -> None:
        """Into the rows of a float32 tensor; what a small tensor does not fill is 0."""
        with torch.cuda.device(self._device):
            _read[(self._pointers.shape[0],)](self._pointers, self._sizes, out, _DTYPES[self._dtype], self._elements, num_warps=4)


def make_table(rows: int, device: torch.device) -> Table:
    """The fast one where it works: tried once, with the reason in the log where it does not."""
    if triton is not None and device.type == "cuda":
        try:
            table = TritonTable(rows, device)
            for full in (True, False):
                table.full = full
                for dtype in _DTYPES:
                    table.look(torch.ones(32, dtype=dtype, device=device), 0)
                table.send()
        except Exception as error:  # no C compiler, an unknown device, ...: plain torch does the same
            log.info("nanproof: Triton does not work here (%s); plain torch is used", str(error).splitlines()[0])
        else:
            return table
    return PlainTable(rows, device)
