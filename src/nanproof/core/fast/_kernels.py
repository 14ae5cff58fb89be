"""Two Triton kernels for CUDA: the norms of all gradients in one pass at memory speed, and the whole verdict in one launch.

They compute what `Parameters.norms` and `verdict.judge` compute in plain torch, which is the reference they are tested against
and what runs wherever these cannot (no Triton, sharded or sparse gradients, a GradScaler, half-precision weights). On an H200
with 1.1 B parameters the norms take 1.00 ms instead of 1.32, and the verdict one launch instead of about 110, which is
1.2 ms of the host's time.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-not-found, import-untyped, misc"
from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

from nanproof.core.judge._parameters import Parameters, Present
from nanproof.core.judge._stats import (
    CLAMP,
    LEAST_CLIP,
    LEAST_SPIKE,
    MEAN_WINDOW,
    MOVED,
    NEW_LEVEL,
    SMALLEST_LOSS,
    SPREAD_WINDOW,
    RunningStats,
)
from nanproof.core.judge._verdict import Verdict

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

log = logging.getLogger("nanproof")
CHUNK, BLOCK = 65536, 4096


if triton is not None:

    @triton.jit
    def _sums_of_squares(
        pointers, chunk_tensor, chunk_start, sizes, partial, DTYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
    ):
        chunk = tl.program_id(0)
        tensor = tl.load(chunk_tensor + chunk)
        start, size = tl.load(chunk_start + chunk), tl.load(sizes + tensor)
        base = tl.load(pointers + tensor).to(tl.pointer_type(DTYPE))
        total = tl.zeros((BLOCK,), tl.float32)
        for offset in range(0, CHUNK, BLOCK):
            i = start + offset + tl.arange(0, BLOCK)
            x = tl.load(base + i, mask=i < size, other=0.0).to(tl.float32)
            total += x * x
        tl.store(partial + chunk, tl.sum(total))

    @triton.jit
    def _roots_of_sums(partial, first_chunk, norms, BLOCK: tl.constexpr):
        tensor = tl.program_id(0)
        begin, end = tl.load(first_chunk + tensor), tl.load(first_chunk + tensor + 1)
        total = tl.zeros((BLOCK,), tl.float32)
        for offset in range(begin, end, BLOCK):
            i = offset + tl.arange(0, BLOCK)
            total += tl.load(partial + i, mask=i < end, other=0.0)
        tl.store(norms + tensor, tl.sqrt(tl.sum(total)))

    @triton.jit
    def _finite(x):
        return tl.abs(x) < float("inf")

    @triton.jit
    def _is_spike(point, mean, spread, sensitivity, least):
        return point - mean > tl.maximum(spread * sensitivity, least)

    @triton.jit
    def _take(state, i, point, count, bound_scale, least, warm, accepted, settled):
        """One coordinate of RunningStats.take; `i` is 0 for the norm and 1 for the loss."""
        mean, last = tl.load(state + 2 + i), tl.load(state + 6 + i)
        spread = tl.load(state + 4 + i) * settled
        bound = tl.where(warm, tl.maximum(spread * bound_scale, least), float("inf"))
        gap = tl.where(accepted, tl.minimum(tl.maximum(point - mean, -bound), bound), 0.0)
        value = mean + gap
        change = tl.minimum(tl.abs(value - last) * 0.7071067811865476, bound)
        change = tl.where(accepted & (count > 0), change - spread, 0.0)
        return mean, spread, gap, value, last, change

    @triton.jit
    def _judge(
        norms, count_of_norms, loss_ptr, also_ptr, buffer_ptr, latch_ptr, state, out, skip_ptr, divisor_ptr,
        max_norm, sensitivity, warmup,
        LEAST_NORM: tl.constexpr, LEAST_LOSS: tl.constexpr, CLAMP: tl.constexpr, LEAST_CLIP: tl.constexpr,
        MEAN_WINDOW: tl.constexpr, SPREAD_WINDOW: tl.constexpr, NEW_LEVEL: tl.constexpr, SMALLEST_LOSS: tl.constexpr,
        MOVED: tl.constexpr,
        AUTO: tl.constexpr, CLIP: tl.constexpr, ALSO: tl.constexpr, BUFFERS: tl.constexpr, LATCHING: tl.constexpr,
        LOSS_DECIDES: tl.constexpr, SKIP_SPIKES: tl.constexpr, HEAD: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        squares = tl.zeros((BLOCK,), tl.float32)
        for offset in range(0, count_of_norms, BLOCK):
            i = offset + tl.arange(0, BLOCK)
            x = tl.load(norms + i, mask=i < count_of_norms, other=0.0)
            tl.store(out + HEAD + i, x, mask=i < count_of_norms)
            squares += x * x
        total = tl.sqrt(tl.sum(squares))
        loss = tl.load(loss_ptr)
        finite = _finite(total)
        if LOSS_DECIDES:
            finite = finite & _finite(loss)
            if ALSO:
                finite = finite & _finite(tl.load(also_ptr))
        place = 0.0
        if BUFFERS:
            place = tl.load(buffer_ptr).to(tl.float32)
            if LOSS_DECIDES:
                finite = finite & (place == 0)
        held = tl.load(state) < 0
        if LATCHING:
            held = tl.load(latch_ptr) > 0

        count, streak = tl.load(state), tl.load(state + 1)
        mean_norm, mean_loss = tl.load(state + 2), tl.load(state + 3)
        spread_norm, spread_loss = tl.load(state + 4), tl.load(state + 5)
        norm_point = tl.log(tl.maximum(total, 1.1754943508222875e-38))
        size = tl.load(state + 8)
        own_loss = count * 0
        if LOSS_DECIDES:
            own_loss = loss
        loss_size = tl.abs(own_loss)
        x = loss_size / tl.maximum(tl.where(count > 0, size, loss_size), SMALLEST_LOSS)
        x = tl.where(x > 1e9, tl.log(x) + 0.6931471805599453, tl.log(x + tl.sqrt(x * x + 1)))  # asinh
        loss_point = tl.where(own_loss < 0, -x, x)
        spike = _is_spike(norm_point, mean_norm, spread_norm, sensitivity, LEAST_NORM)
        moved = norm_point - mean_norm > MOVED
        spike = spike | (_is_spike(loss_point, mean_loss, spread_loss, sensitivity, LEAST_LOSS) & moved)
        spike = spike & (count >= warmup) & finite & (held == 0)
        bad = finite == 0
        if SKIP_SPIKES:
            bad = bad | spike
        skip = bad | held
        accepted = skip == 0

        clip = 1.0
        if CLIP:
            limit = max_norm
            if AUTO:
                usual = tl.exp(mean_norm + tl.maximum(spread_norm * CLAMP, LEAST_CLIP))
                limit = tl.where(count >= warmup, usual, float("inf"))
            clip = (total + 1e-6) / limit
            clip = tl.where(clip > 1, clip, 1.0)
        tl.store(skip_ptr, skip.to(tl.float32))
        tl.store(divisor_ptr, clip)
        tl.store(out + 0, loss)
        tl.store(out + 1, total)
        tl.store(out + 2, clip)
        tl.store(out + 3, bad.to(tl.float32))
        tl.store(out + 4, spike.to(tl.float32))
        tl.store(out + 5, 0.0)
        tl.store(out + 6, place)
        tl.store(out + 7, 0.0)
        tl.store(out + 8, mean_norm)
        tl.store(out + 9, mean_loss)
        tl.store(out + 10, spread_norm)
        tl.store(out + 11, spread_loss)
        tl.store(out + 12, size)
        tl.store(out + 13, held.to(tl.float32))
        if LATCHING:
            tl.store(latch_ptr, skip.to(tl.float32))

        accepted = accepted & (total > 0)
        streak = tl.where(spike, streak + 1, tl.where(accepted, 0.0, streak))
        settled = (streak < NEW_LEVEL).to(tl.float32)
        count = count * settled
        warm = count >= warmup
        mean_norm, spread_norm, gap_norm, value_norm, last_norm, change_norm = _take(
            state, 0, norm_point, count, CLAMP, LEAST_NORM, warm, accepted, settled
        )
        mean_loss, spread_loss, gap_loss, value_loss, last_loss, change_loss = _take(
            state, 1, loss_point, count, CLAMP, LEAST_LOSS, warm, accepted, settled
        )
        age = tl.minimum(count + 1, MEAN_WINDOW)
        span = tl.minimum(tl.maximum(count, 1.0), SPREAD_WINDOW)
        tl.store(state + 0, count + accepted.to(tl.float32))
        tl.store(state + 1, streak * settled)
        tl.store(state + 2, mean_norm + gap_norm / age)
        tl.store(state + 3, mean_loss + gap_loss / age)
        tl.store(state + 4, spread_norm + change_norm / span)
        tl.store(state + 5, spread_loss + change_loss / span)
        tl.store(state + 6, tl.where(accepted, value_norm, last_norm))
        tl.store(state + 7, tl.where(accepted, value_loss, last_loss))
        loss_size = tl.where(count > 0, tl.minimum(loss_size, 2 * size + SMALLEST_LOSS), loss_size)
        tl.store(state + 8, size + tl.where(accepted, loss_size - size, 0.0) / age)

    @triton.jit
    def _copy_if(skip, to, source, chunk_tensor, chunk_start, sizes, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
        """Copy tensors from one table of addresses to another, if the step is bad; else read nothing but that."""
        if tl.load(skip) > 0:
            chunk = tl.program_id(0)
            tensor = tl.load(chunk_tensor + chunk)
            start, size = tl.load(chunk_start + chunk), tl.load(sizes + tensor)
            there = tl.load(to + tensor).to(tl.pointer_type(tl.float32))
            here = tl.load(source + tensor).to(tl.pointer_type(tl.float32))
            for offset in range(0, CHUNK, BLOCK):
                i = start + offset + tl.arange(0, BLOCK)
                tl.store(there + i, tl.load(here + i, mask=i < size, other=0.0), mask=i < size)

    _DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Kernels:
    """The kernels, their tables, and whether they can be used here."""

    @classmethod
    def available(cls, device: torch.device, dtype: torch.dtype) -> Kernels | None:
        """Compile and try them once; None, with the reason in the log, where that does not work."""
        if triton is None or device.type != "cuda" or dtype != torch.float32:
            return None
        try:
            kernels = cls(device)
            x = torch.ones(8, dtype=torch.float32, device=device)
            stats = RunningStats(device, dtype, 20, 8.0)
            norms = kernels.norms([x, x])
            assert norms is not None
            kernels.judge(x[0], norms, None, None, True, 1.0, stats, False, None)
        except Exception as error:  # no C compiler, an unknown device, ...: plain torch does the same
            log.info("nanproof: Triton does not work here (%s); plain torch is used", str(error).splitlines()[0])
            return None
        return kernels

    @classmethod
    def aside(cls, device: torch.device) -> Aside | None:
        """A place for what the device must put back by itself; None where there is no way."""
        return Aside(device) if cls.available(device, torch.float32) is not None else None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[tuple[Any, ...], _Table] = {}
        self._nothing = torch.zeros((), dtype=torch.float32, device=device)

    def norms(self, gradients: list[Tensor]) -> Tensor | None:
        """The 2-norm of each gradient; None where the kernel does not apply. All gradients have one dtype and device."""
        if gradients[0].dtype not in _DTYPES or gradients[0].device != self._device:
            return None
        sizes = tuple(map(Tensor.numel, gradients))
        key = gradients[0].dtype, sizes
        table = self._tables.get(key)
        if table is None:
            if len(self._tables) > 8:  # gradients that come and go in ever new patterns are not worth a table each
                return None
            table = self._tables[key] = _Table(sizes, self._device)
        pointers = table.pointers(gradients)
        norms = torch.empty(len(sizes), dtype=torch.float32, device=self._device)
        with torch.cuda.device(self._device):
            _sums_of_squares[(table.chunks,)](
                pointers,
                table.chunk_tensor,
                table.chunk_start,
                table.sizes,
                table.partial,
                _DTYPES[gradients[0].dtype],
                CHUNK,
                BLOCK,
                num_warps=8,
            )
            _roots_of_sums[(len(sizes),)](table.partial, table.first_chunk, norms, 512)
        return norms

    def over(self, gradients: list[Tensor], parameters: Parameters, present: Present) -> Kernels:
        """Kernels whose tables hold these gradients, for a graph: their addresses do not travel again."""
        own = Kernels(self._device)
        parameters.norms(gradients, own, present)
        return own

    def judge(
        self,
        loss: Tensor,
        norms: Tensor,
        also_finite: Tensor | None,
        bad_buffer: Tensor | None,
        loss_decides: bool,
        max_norm: float | str | None,
        stats: RunningStats,
        skip_spikes: bool,
        latch: Tensor | None,
    ) -> Verdict:
        """`verdict.judge`, the statistics' `take` and the latch in one launch."""
        n, nothing = norms.numel(), self._nothing
        out = torch.empty(Verdict.HEAD + n, dtype=torch.float32, device=self._device)
        flags = torch.empty(2, dtype=torch.float32, device=self._device)
        auto, clips = isinstance(max_norm, str), max_norm is not None
        with torch.cuda.device(self._device):
            _judge[(1,)](
                norms, n, loss, nothing if also_finite is None else also_finite, nothing if bad_buffer is None else bad_buffer,
                nothing if latch is None else latch, stats.state, out, flags, flags[1:],
                1.0 if isinstance(max_norm, str) or max_norm is None else float(max_norm), stats.sensitivity, float(stats.warmup),
                LEAST_SPIKE[0], LEAST_SPIKE[1], CLAMP, LEAST_CLIP, MEAN_WINDOW, SPREAD_WINDOW, NEW_LEVEL,
                SMALLEST_LOSS, MOVED,
                auto, clips, also_finite is not None, bad_buffer is not None, latch is not None, loss_decides, skip_spikes,
                Verdict.HEAD, 1024, num_warps=4,
            )  # fmt: skip
        return Verdict(skip=flags[0], divisor=flags[1] if clips else None, packed=out)


class Aside:
    """Keeps fp32 tensors on a bad step in pinned memory of the host, which a kernel can write: a good step costs two launches."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: list[Tensor] = []
        self._table: _Table | None = None
        self._sources: Tensor | None = None
        self._places: Tensor | None = None

    def save(self, tensors: list[Tensor], skip: Tensor) -> None:
        sizes = tuple(t.numel() for t in tensors)
        if self._table is None or tuple(k.numel() for k in self._kept) != sizes:
            self._kept = [torch.empty(count, dtype=torch.float32, device="cpu", pin_memory=True) for count in sizes]
            self._table = _Table(sizes, self._device)
            self._places = torch.tensor([k.data_ptr() for k in self._kept], device=self._device)
        self._sources = self._table.pointers(tensors)
        self._copy(self._places, self._sources, skip)

    def put_back(self, skip: Tensor) -> None:
        """Into the tensors that were saved last."""
        self._copy(self._sources, self._places, skip)

    def _copy(self, to: Any, source: Any, skip: Tensor) -> None:
        table = self._table
        assert table is not None
        with torch.cuda.device(self._device):
            _copy_if[(table.chunks,)](
                skip, to, source, table.chunk_tensor, table.chunk_start, table.sizes, CHUNK, BLOCK, num_warps=8
            )


class _Table:
    """Where each gradient's chunks lie: fixed for a list of sizes, but for the addresses, which travel when they change."""

    SLOTS = 16
    """Pinned copies of the addresses, used in turn: a copy under way is not overwritten."""

    def __init__(self, sizes: tuple[int, ...], device: torch.device) -> None:
        counts = [math.ceil(size / CHUNK) for size in sizes]
        tensors = [t for t, count in enumerate(counts) for _ in range(count)]
        starts = [i * CHUNK for count in counts for i in range(count)]
        firsts = [0]
        for count in counts:
            firsts.append(firsts[-1] + count)
        self.chunks = len(tensors)
        self.chunk_tensor = _upload(tensors, torch.int32, device)
        self.chunk_start = _upload(starts, torch.int64, device)
        self.first_chunk = _upload(firsts, torch.int32, device)
        self.sizes = _upload(list(sizes), torch.int64, device)
        self.partial = torch.empty(self.chunks, dtype=torch.float32, device=device)
        self._device = device
        self._known: list[int] = []
        empty = torch.empty(self.SLOTS, len(sizes), dtype=torch.int64, device="cpu", pin_memory=True)
        self._slots = empty.unbind()
        self._turn = 0
        self._on_device: Any = None

    def pointers(self, gradients: list[Tensor]) -> Tensor:
        now = list(map(Tensor.data_ptr, gradients))
        if now != self._known:
            slot = self._slots[self._turn % self.SLOTS]
            self._turn += 1
            slot.copy_(torch.tensor(now, device="cpu"))
            self._on_device = slot.to(self._device, non_blocking=True)
            self._known = now
        return self._on_device  # type: ignore[no-any-return]


def _upload(values: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu").pin_memory().to(device, non_blocking=True)
