"""All statistics of a tensor in one pass, on CUDA: a Triton kernel, one launch for up to 64 tensors.

Launching costs the host more than reading an output costs the device, so outputs wait for each other. One that is written in
place meanwhile is not what the module returned any more: it is left out, and its site looked at at once from then on.

Every program of a launch keeps its part of the sums in a place of its own: there are no atomics, the result does not depend on
the order, and a second call of the same site adds to it. One small launch a step puts the parts together. Whether a look is
light or full is read from device memory, so a captured graph follows it. How many values are NaN, Inf or near the maximum is
counted in a second pass that ordinary tensors do not take.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped, misc"
from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from nanproof.core.parameters import fills_its_memory, local
from nanproof.core.telemetry import Courier
from nanproof.observe.tables import COLUMNS, NEAR, PlainTable, Rows, Table, add

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

log = logging.getLogger("nanproof")

TOGETHER = 64
"""Tensors in one launch."""
HELD = 256
"""Outputs that wait hold at most this part of the device's memory."""
PROGRAMS = 256
"""Programs for one tensor, at the most."""
BLOCK = 2048
WIDTH = 8
"""Numbers a program keeps: the columns, and the squares of values above 2^48, scaled down so that they do not overflow."""

if triton is not None:

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

    _DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    _NEAR = {dtype: int(torch.tensor(torch.finfo(dtype).max / NEAR, dtype=torch.float32).view(torch.int32)) for dtype in _DTYPES}
    """As the bits of a float32: those of positive numbers are in the same order as the numbers."""


class TritonTable:
    """The table on a CUDA device. What the kernel cannot take (float64, another device) goes to a plain one."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows, self._device = rows, device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._table = torch.zeros(rows, PROGRAMS, WIDTH, device=device)
        self._mode = torch.zeros(1, dtype=torch.int32, device=device)
        self.dtypes: dict[int, torch.dtype] = {}
        self._full = False
        self._used = False
        self._courier = Courier(device)
        self._plain = PlainTable(device)
        self._waiting: dict[torch.dtype, dict[int, tuple[Tensor, int]]] = {dtype: {} for dtype in _DTYPES}
        """By dtype and row: outputs that have not been looked at yet, and how often they had been written."""
        self._bytes = 0
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
        if type(x) is not Tensor:
            x = local(x)
        waiting = self._waiting.get(x.dtype)
        if waiting is None or x.device != self._device:
            self.dtypes[row] = x.dtype
            self._plain.look(x, row)
            return
        if row in waiting:  # one launch adds to a row once
            self._launch(x.dtype)
            waiting = self._waiting[x.dtype]
        waiting[row] = x, x._version
        self._bytes += x.nbytes
        if len(waiting) == TOGETHER or row in self._written:
            self._launch(x.dtype)
        elif self._bytes > self._most:
            self.flush()

    def flush(self) -> None:
        """Look at everything that waits."""
        for dtype, waiting in self._waiting.items():
            if waiting:
                self._launch(dtype)
        self._bytes = 0

    def _launch(self, dtype: torch.dtype) -> None:
        waiting, self._waiting[dtype] = self._waiting[dtype], {}
        pointers, sizes, rows, alive = [], [], [], []
        for row, (x, version) in waiting.items():
            if x._version != version:
                self._written.add(row)
            elif size := x.numel():
                if not x.is_contiguous() and not fills_its_memory(x):
                    x = x.contiguous()
                    alive.append(x)
                self.dtypes[row] = dtype
                pointers.append(x.data_ptr())
                sizes.append(size)
                rows.append(row)
        count = len(rows)
        if not count:
            return
        self._used = True
        aligned = not any(p % 16 for p in pointers) and not any(s % 16 for s in sizes)
        filler = [0] * (TOGETHER - count)
        if torch.cuda.is_current_stream_capturing():  # a copy would be repeated from host memory that is gone by then
            on_device = torch.zeros(3 * TOGETHER, dtype=torch.int64, device=self._device)
            for place, number in zip((0, TOGETHER, 2 * TOGETHER), (pointers[0], sizes[0], rows[0]), strict=True):
                on_device[place].fill_(number)
        else:
            numbers = torch.tensor([*pointers, *filler, *sizes, *filler, *rows, *filler], pin_memory=True)
            on_device = numbers.to(self._device, non_blocking=True)
        programs = max(32, min(PROGRAMS, 2112 // count, triton.cdiv(max(sizes), BLOCK)))
        with torch.cuda.device(self._device):
            _look[(programs, count)](
                on_device, self._mode, self._table, _NEAR[dtype], min(_NEAR[dtype], 0x57800000), _DTYPES[dtype], aligned,
                TOGETHER, PROGRAMS, BLOCK, WIDTH, num_warps=8,
            )  # fmt: skip

    def send(self) -> Callable[[], Rows]:
        self.flush()
        out = torch.empty(WIDTH, self._rows, device=self._device)
        with torch.cuda.device(self._device):
            _gather[(self._rows,)](self._table, out, self._rows, PROGRAMS, WIDTH)
        self._used = False
        full, plain = self._full, self._plain.send()
        parcel = self._courier.send((out if full else out[:2]).flatten())

        def read() -> Rows:
            values, n = parcel(), self._rows
            columns = [values[i : i + n] for i in range(0, len(values), n)]
            rows = plain()
            for row in range(n):
                if not columns[1][row]:
                    continue
                seen = [c[row] for c in columns[: len(COLUMNS)]]
                if full:
                    seen[2] += columns[-1][row] * 2.0**160
                add(rows, row, seen)
            return rows

        return read

    def clear(self) -> None:
        self._plain.clear()
        for waiting in self._waiting.values():
            waiting.clear()
        self._bytes = 0
        if self._used:
            self._table.zero_()
            self._used = False


def make_table(rows: int, device: torch.device) -> Table:
    """The fast one where it works: tried once, with the reason in the log where it does not."""
    if triton is not None and device.type == "cuda":
        try:
            table = TritonTable(rows, device)
            for dtype in _DTYPES:
                table.look(torch.ones(32, dtype=dtype, device=device), 0)
            table.send()
        except Exception as error:  # no C compiler, an unknown device, ...: plain torch does the same
            log.info("nanproof: Triton does not work here (%s); plain torch is used", str(error).splitlines()[0])
        else:
            return table
    return PlainTable(device)
