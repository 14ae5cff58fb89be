"""One pass over a tensor for all its statistics, on CUDA: a Triton kernel, one launch a tensor.

Every program of a launch keeps its part of the sums in a place of its own: there are no atomics, the result does not depend on
the order, and a second call of the same site adds to it. One small launch a step puts the parts together. Whether a look is
light or full is read from device memory, so a captured graph follows it.
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

PROGRAMS = 528
"""Of one launch at the most: four for each multiprocessor of an H100 or H200."""
BLOCK = 4096
WIDTH = 8
"""Numbers a program keeps: the columns, and the squares of values above 2^48, scaled down so that they do not overflow."""

if triton is not None:

    @triton.jit(do_not_specialize=["row"])
    def _look(x, size, row, full, table, near, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
        program = tl.program_id(0)
        stride = tl.num_programs(0).to(tl.int64) * BLOCK
        place = table + (row * PROGRAMS + program) * WIDTH
        top = tl.zeros((BLOCK,), tl.int32)
        if tl.load(full) == 0:
            for start in range(program.to(tl.int64) * BLOCK, size, stride):
                i = start + tl.arange(0, BLOCK)
                value = tl.load(x + i, mask=i < size, other=0.0).to(tl.float32)
                top = tl.maximum(top, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        else:
            squares, large = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
            nans, infs = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
            zeros, nears = tl.zeros((BLOCK,), tl.int32), tl.zeros((BLOCK,), tl.int32)
            for start in range(program.to(tl.int64) * BLOCK, size, stride):
                i = start + tl.arange(0, BLOCK)
                inside = i < size
                value = tl.load(x + i, mask=inside, other=0.0).to(tl.float32)
                bits = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
                top = tl.maximum(top, bits)
                big = bits >= 0x57800000  # 2^48, and Inf and NaN
                small = tl.where(big, 0.0, value)
                scaled = tl.where(big, value, 0.0) * 8.271806125530277e-25  # 2^-80
                squares += small * small
                large += scaled * scaled
                nans += (bits > 0x7F800000).to(tl.int32)
                infs += (bits == 0x7F800000).to(tl.int32)
                zeros += (inside & (bits == 0)).to(tl.int32)
                nears += ((tl.abs(value) >= near) & (bits < 0x7F800000)).to(tl.int32)
            tl.store(place + 2, tl.load(place + 2) + tl.sum(squares))
            tl.store(place + 3, tl.load(place + 3) + tl.sum(nans).to(tl.float32))
            tl.store(place + 4, tl.load(place + 4) + tl.sum(infs).to(tl.float32))
            tl.store(place + 5, tl.load(place + 5) + tl.sum(zeros).to(tl.float32))
            tl.store(place + 6, tl.load(place + 6) + tl.sum(nears).to(tl.float32))
            tl.store(place + 7, tl.load(place + 7) + tl.sum(large))
        before = tl.load(place).to(tl.int32, bitcast=True)
        tl.store(place, tl.maximum(before, tl.max(top)).to(tl.float32, bitcast=True))
        if program == 0:
            tl.store(place + 1, tl.load(place + 1) + size.to(tl.float32))

    @triton.jit
    def _gather(table, out, rows, PROGRAMS: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
        """Put the parts of a row together, and leave the table empty."""
        row = tl.program_id(0)
        i = tl.arange(0, BLOCK)
        there = i < PROGRAMS
        place = table + (row * PROGRAMS + i) * WIDTH
        top = tl.load(place, mask=there, other=0.0).to(tl.int32, bitcast=True)
        tl.store(out + row, tl.max(top).to(tl.float32, bitcast=True))
        tl.store(place, 0.0, mask=there)
        for column in range(1, WIDTH):
            tl.store(out + column * rows + row, tl.sum(tl.load(place + column, mask=there, other=0.0)))
            tl.store(place + column, 0.0, mask=there)

    _DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonTable:
    """The table on a CUDA device. What the kernel cannot take (float64, another device) goes to a plain one."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self._rows, self._device = rows, device
        self._table = torch.zeros(rows, PROGRAMS, WIDTH, device=device)
        self._mode = torch.zeros(1, dtype=torch.int32, device=device)
        self._full = False
        self._used = False
        self._courier = Courier(device)
        self._plain = PlainTable(device)

    @property
    def full(self) -> bool:
        return self._full

    @full.setter
    def full(self, full: bool) -> None:
        if full != self._full:
            self._full = self._plain.full = full
            self._mode.fill_(int(full))

    def look(self, x: Tensor, row: int) -> None:
        x = local(x)
        if x.dtype not in _DTYPES or x.device != self._device:
            self._plain.look(x, row)
            return
        size = x.numel()
        if not size:
            return
        if not fills_its_memory(x):
            x = x.contiguous()
        self._used = True
        limit = torch.finfo(x.dtype).max / NEAR
        with torch.cuda.device(self._device):
            _look[(min(PROGRAMS, triton.cdiv(size, BLOCK)),)](
                x, size, row, self._mode, self._table, limit, PROGRAMS, BLOCK, WIDTH, num_warps=8
            )

    def send(self) -> Callable[[], Rows]:
        out = torch.empty(WIDTH, self._rows, device=self._device)
        with torch.cuda.device(self._device):
            _gather[(self._rows,)](self._table, out, self._rows, PROGRAMS, triton.next_power_of_2(PROGRAMS), WIDTH)
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
        if self._used:
            self._table.zero_()
            self._used = False


def make_table(rows: int, device: torch.device) -> Table:
    """The fast one where it works: tried once, with the reason in the log where it does not."""
    if triton is not None and device.type == "cuda":
        try:
            table = TritonTable(rows, device)
            table.look(torch.ones(8, device=device), 0)
            table.send()
        except Exception as error:  # no C compiler, an unknown device, ...: plain torch does the same
            log.info("nanproof: Triton does not work here (%s); plain torch is used", str(error).splitlines()[0])
        else:
            return table
    return PlainTable(device)
