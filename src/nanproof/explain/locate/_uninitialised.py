"""Memory that is allocated and not written: fill it with a known number, and see whether that reaches the loss."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.utils._python_dispatch import TorchDispatchMode

from nanproof.explain.locate._calls import CallStack
from nanproof.explain.locate._trace import source_of_operation

_ALLOCATE = frozenset({"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"})


@dataclass(frozen=True, slots=True)
class Allocation:
    """A tensor that was allocated without being filled."""

    tensor: Tensor
    source: str
    where: str
    function: str | None
    """The custom autograd.Function that allocated it."""
    backward: bool

    @property
    def unwritten(self) -> int:
        """How many elements still hold the NaN they were filled with."""
        return int(torch.isnan(self.tensor.detach()).sum())


class FilledMemory(TorchDispatchMode):
    """While open, tensors from torch.empty and its relatives hold the number that `fill` returns for the line that made them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, fill: Callable[[str], float], stack: CallStack) -> None:
        super().__init__()
        self._fill, self._stack = fill, stack
        self.made: list[Allocation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._schema.name.removeprefix("aten::") not in _ALLOCATE or not isinstance(out, Tensor):
            return out
        if not out.is_floating_point() or out.is_meta or out.layout is not torch.strided:
            return out
        source = source_of_operation()
        out.fill_(self._fill(source))
        call = self._stack.current
        name, backward = _custom_function()
        where = call.path if call is not None else name if backward and name else "loss_fn"
        self.made.append(Allocation(out, source, where, name, backward))
        return out

    def watching(self) -> tuple[AbstractContextManager[Any], ...]:
        """The contexts to run a replay under."""
        return self._stack.following(), self


def _custom_function() -> tuple[str | None, bool]:
    """The custom autograd.Function whose code is running, and whether that is its backward."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        ctx = frame.f_locals.get("ctx")
        if isinstance(ctx, FunctionCtx):
            name = type(ctx).__name__.removesuffix("Backward")
            return name, isinstance(ctx, BackwardCFunction) and frame.f_code.co_name == "backward"
        frame = frame.f_back
    return None, torch._C._current_autograd_node() is not None
