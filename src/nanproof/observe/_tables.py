"""Where statistics are collected until the step's record leaves for the host: one row a site, and one for its gradient.

`PlainTable` is plain torch and runs everywhere; it is what the Triton table in `_kernels` is tested against, and takes what
that one cannot.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from nanproof._records import ABSENT
from nanproof.core._telemetry import Courier
from nanproof.core.judge._parameters import local

COLUMNS = ("absmax", "count", "squares", "nan", "inf", "zeros", "near")
"""Of each row: the largest absolute value (NaN if there is one, else Inf if there is one) and how many values there are; of full
looks also the sum of squares, and how many are NaN, Inf, 0, and finite but within a factor of 8 of the dtype's maximum."""
NEAR = 8
Rows = dict[int, list[float]]
"""By row, what a full look saw: all columns. Rows not reached are not there."""


@dataclass(slots=True)
class Seen:
    """What was seen in a step."""

    absmax: list[float]
    """By row: the largest absolute value; `ABSENT` where nothing was seen."""
    rows: Rows = field(default_factory=dict)
    """Of full looks."""

    def take(self, other: Seen) -> None:
        """What was seen elsewhere in the same step."""
        self.absmax = list(map(largest, self.absmax, other.absmax))
        for row, values in other.rows.items():
            add(self.rows, row, values)


class Table(Protocol):
    """Takes tensors, gives a parcel."""

    full: bool
    """Whether looks are full ones."""
    dtypes: list[torch.dtype | None]
    """By row, of what was seen last."""

    def look(self, x: Tensor, row: int) -> None: ...
    def flush(self) -> None: ...
    def send(self) -> Callable[[], Seen]: ...
    def clear(self) -> None: ...


def largest(a: float, b: float) -> float:
    """NaN if one is NaN."""
    return a if a != a or a > b else b


def add(rows: Rows, row: int, seen: list[float]) -> None:
    """Another call of the same site: a micro-batch, or a module used twice."""
    before = rows.get(row)
    rows[row] = (
        seen if before is None else [largest(before[0], seen[0]), *(a + b for a, b in zip(before[1:], seen[1:], strict=True))]
    )


class PlainTable:
    """Looks with torch's own operations. Nothing is read back before the parcel is opened; on a CPU there is no waiting."""

    KEPT = 1 << 14
    """Looks on a device between two steps; of more (an evaluation between steps, say) the oldest are dropped."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.full = False
        self.dtypes: list[torch.dtype | None] = [None] * rows
        self._device = device
        self._courier = Courier(device)
        self._waiting: deque[tuple[int, int, Sequence[Tensor]]] = deque(maxlen=self.KEPT)
        self._absent = [ABSENT] * rows
        self._seen = Seen(self._absent.copy())
        """Of tensors on the host, whose numbers are known at once."""

    def look(self, x: Tensor, row: int) -> None:
        x = x.detach() if type(x) is Tensor else local(x.detach())
        count = x.numel()
        if not count or not x.is_floating_point():
            return
        self.dtypes[row] = x.dtype
        low, high = torch.aminmax(x)
        if x.is_cpu:
            below, above = -low.item(), high.item()
            top = below if below != below or below > above else above
            if self.full:
                self._add(self._seen, row, [top, float(count), *_rest_on_host(x, top)])
                return
            before = self._seen.absmax[row]  # as in `largest`, without the calls
            if not (before != before or before > top):
                self._seen.absmax[row] = top
        else:
            self._waiting.append((row, count, [torch.maximum(-low, high), *(_rest(x) if self.full else ())]))

    def flush(self) -> None:
        """Nothing waits here."""

    def send(self) -> Callable[[], Seen]:
        looks, seen = list(self._waiting), self._seen
        self.clear()
        if not looks:
            return lambda: seen
        waiting = [v for _, _, values in looks for v in values]
        wide = torch.float64 if any(v.dtype == torch.float64 for v in waiting) else torch.float32
        parcel = self._courier.send(torch.stack([v.to(self._device, wide, non_blocking=True) for v in waiting]))

        def read() -> Seen:
            arrived = iter(parcel())
            for row, count, values in looks:
                top, *rest = (next(arrived) for _ in values)
                self._add(seen, row, [top, float(count), *_squared(rest)])
            return seen

        return read

    def clear(self) -> None:
        self._waiting.clear()
        self._seen = Seen(self._absent.copy())

    @staticmethod
    def _add(seen: Seen, row: int, values: list[float]) -> None:
        seen.absmax[row] = largest(seen.absmax[row], values[0])
        if len(values) == len(COLUMNS):
            add(seen.rows, row, values)


def _squared(rest: list[float]) -> list[float]:
    """With the square of the norm; as a product, which may be Inf. A power would raise."""
    return [rest[0] * rest[0], *rest[1:]] if rest else []


def _norm(x: Tensor, wide: bool) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.float64 if wide or x.dtype == torch.float64 else torch.float32)
    return norm


def _rest(x: Tensor) -> list[Tensor]:
    """Norm, and how many are NaN, Inf, 0 and near the maximum."""
    finite_and_near = x.isfinite() & (x.abs() >= torch.finfo(x.dtype).max / NEAR)
    return [_norm(x, x.device.type != "mps"), x.isnan().sum(), x.isinf().sum(), (x == 0).sum(), finite_and_near.sum()]


def _rest_on_host(x: Tensor, top: float) -> list[float]:
    """The same with the square of the norm, without the passes that `top` makes needless."""
    if not math.isfinite(top):
        return _squared([float(t) for t in _rest(x)])
    near = float((x.abs() >= torch.finfo(x.dtype).max / NEAR).sum()) if top >= torch.finfo(x.dtype).max / NEAR else 0.0
    return _squared([_norm_on_host(x, top), 0.0, 0.0, float(x.numel() - int(x.count_nonzero())), near])


def _norm_on_host(x: Tensor, top: float) -> float:
    """In double where squares leave single's range. Else by rows first: one sum over millions is wrong by a percent."""
    if not 1e-16 < top < 1e16 or x.dtype == torch.float64:
        return float(_norm(x, True))
    rows = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float32) if x.dim() > 1 else x
    return float(_norm(rows, True))
