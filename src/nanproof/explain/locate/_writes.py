"""Writes: which operation of a step writes into its own batch, and makes it non-finite."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nanproof.core.support._tree import map_tensors, tensors_in
from nanproof.explain.locate._locate import batch_shape, where_in_batch
from nanproof.explain.locate._trace import source_of_operation, writes
from nanproof.explain.replay._replay import Replay


@dataclass(frozen=True, slots=True)
class Write:
    """An operation that writes into a tensor of the batch."""

    op: str
    source: str
    name: str
    """The tensor, as an expression."""
    samples: tuple[int, ...]
    breaks: bool
    """Whether the tensor was finite before it and is not afterwards."""


class _Writes(TorchDispatchMode):
    """While open, notes the operations that write into these tensors."""

    def __init__(self, named: Sequence[tuple[str, Tensor]], samples: int, length: int | None) -> None:
        super().__init__()
        self._named = {t.untyped_storage().data_ptr(): (name, t) for name, t in named if t.is_floating_point()}
        self._shape = samples, length
        self.found: list[Write] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = self._named.get(_pointer(args[0])) if args and writes(func) else None
        if known is None:
            return func(*args, **(kwargs or {}))
        name, tensor = known
        before = bool(torch.isfinite(tensor).all())
        out = func(*args, **(kwargs or {}))
        bad = ~torch.isfinite(tensor)
        rows = where_in_batch(bad, *self._shape)[0] if tensor.dim() and self._shape[0] else ()
        op = func._schema.name.split("::")[-1].strip("_")
        self.found.append(Write(op, source_of_operation(), name, rows, before and bool(bad.any())))
        return out


def _pointer(value: Any) -> int:
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
        return -1
    return value.untyped_storage().data_ptr()


def write_into_batch(replay: Replay) -> Write | None:
    """Run the forward on a copy of the batch. Return the operation that makes it non-finite; where none does, the first that
    writes into it; None if nothing does."""
    copies = [map_tensors(batch, lambda t: t.detach().clone().requires_grad_(t.requires_grad)) for batch in replay.batches]
    samples, length = batch_shape(copies[0])
    looking = _Writes([pair for copy in copies for pair in tensors_in(copy)], samples, length)
    replay.run(looking, batches=copies, backward=False, spoil=True)
    return next((write for write in looking.found if write.breaks), looking.found[0] if looking.found else None)
