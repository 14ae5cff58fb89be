"""Module calls as they happen: which module is running, called by which, with what going in and coming out.

`Ranges` notes the smallest and largest number of tensors without waiting for the device; a NaN makes both NaN. That is all
that is needed to see what went bad, and it is read once at the end.
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    _global_forward_hooks_always_called,
    _global_forward_hooks_with_kwargs,
    register_module_forward_hook,
    register_module_forward_pre_hook,
)

from nanproof.core.judge._parameters import clean_name, unwrap
from nanproof.core.support._inner import bounds
from nanproof.explain._graph import is_added_up


@dataclass(frozen=True, slots=True)
class Range:
    """Smallest and largest number of a tensor; NaN if it holds one."""

    low: float
    high: float

    @property
    def nan(self) -> bool:
        return self.low != self.low

    @property
    def inf(self) -> bool:
        return math.isinf(self.low) or math.isinf(self.high)

    @property
    def bad(self) -> bool:
        return not (math.isfinite(self.low) and math.isfinite(self.high))

    @property
    def size(self) -> float:
        """The largest magnitude."""
        return math.nan if self.nan else max(abs(self.low), abs(self.high))


GOOD = Range(0.0, 0.0)


def range_of(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """(low, high) on the device; None for what cannot be bad."""
    if not _can_be_bad(tensor):
        return None
    low, high = torch.aminmax(tensor.detach())
    return low, high


def ranges_of(tensors: Sequence[Tensor]) -> list[Range]:
    """The ranges of many tensors; the device is waited for once."""
    found = [GOOD] * len(tensors)
    able = [i for i, t in enumerate(tensors) if _can_be_bad(t)]
    for i, (low, high) in zip(able, bounds([tensors[i] for i in able]), strict=True):
        if low or high:
            found[i] = Range(low, high)
    return found


def _can_be_bad(x: Tensor) -> bool:
    return x.is_floating_point() and x.layout is torch.strided and x.element_size() > 1 and x.numel() > 0 and not x.is_meta


class Ranges:
    """Ranges of many tensors, each taken once as long as it is not written again; read in one go."""

    def __init__(self) -> None:
        self._taken: list[tuple[Tensor, Tensor] | None] = []
        self._seen: dict[int, tuple[Any, int, int]] = {}
        self._read: list[Range] | None = None

    def take(self, tensor: Tensor, look: bool = True) -> int | None:
        """A number to ask `of` with later; None where there is nothing that can be bad. Without `look` it only tells tensors
        apart."""
        known = self._seen.get(id(tensor))
        version = 0 if tensor.is_inference() else tensor._version
        if known is not None and known[0]() is tensor and known[1] == version:
            return known[2]
        pair = None
        if look:
            pair = range_of(tensor)
            if pair is None:
                return None
        self._taken.append(pair)
        place = len(self._taken) - 1
        self._seen[id(tensor)] = (weakref.ref(tensor), version, place)
        self._read = None
        return place

    def of(self, place: int | None) -> Range:
        if place is None:
            return GOOD
        if self._read is None:
            kinds: dict[Any, list[int]] = {}
            ends = {i: pair for i, pair in enumerate(self._taken) if pair is not None}
            for i, (low, _) in ends.items():
                kinds.setdefault((low.device, low.dtype), []).append(i)
            found: dict[int, Range] = {}
            for places in kinds.values():
                pairs = torch.stack([end for i in places for end in ends[i]]).double().tolist()
                found.update({i: Range(pairs[2 * k], pairs[2 * k + 1]) for k, i in enumerate(places)})
            self._read = [found.get(i, GOOD) for i in range(len(self._taken))]
        return self._read[place]


@dataclass(eq=False, slots=True)
class Call:
    """One call of a module."""

    number: int
    path: str
    """As the user's model spells it; the class's name for a module outside it."""
    module: nn.Module
    parent: Call | None
    inputs: list[int | None] = field(default_factory=list)
    outputs: list[int | None] = field(default_factory=list)
    gradients: list[tuple[int, int | None]] = field(default_factory=list)
    """(order, range) of the gradients of its outputs, as backward reached them."""


class CallStack:
    """Follows module calls through global hooks; the calls of two replays of one step have the same numbers."""

    def __init__(self, model: nn.Module) -> None:
        self._paths = {id(m): clean_name(name) or type(m).__name__ for name, m in unwrap(model).named_modules()}
        self.stack: list[Call] = []
        self.count = 0

    @property
    def current(self) -> Call | None:
        return self.stack[-1] if self.stack else None

    @contextmanager
    def following(
        self,
        on_enter: Callable[[Call], None] | None = None,
        on_leave: Callable[[Call, Any, Any, Any], None] | None = None,
    ) -> Iterator[None]:
        def enter(module: nn.Module, _inputs: Any) -> None:
            path = self._paths.get(id(module)) or type(module).__name__
            call = Call(self.count, path, module, self.current)
            self.count += 1
            self.stack.append(call)
            if on_enter is not None:
                on_enter(call)

        def leave(module: nn.Module, inputs: Any, *rest: Any) -> None:
            # After an exception torch calls with fewer arguments, and deeper calls may not have been left.
            kwargs, output = rest if len(rest) == 2 else ({}, None)
            while self.stack:
                call = self.stack.pop()
                if call.module is module:
                    if on_leave is not None:
                        on_leave(call, inputs, kwargs, output)
                    return

        hooks = [
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, with_kwargs=True, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
                # torch forgets to take these two notes back.
                for notes in (_global_forward_hooks_with_kwargs, _global_forward_hooks_always_called):
                    notes.pop(hook.id, None)
            self.stack.clear()


def tensors_of(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """The tensors in what goes into a module or comes out of it."""
    if isinstance(value, Tensor):
        yield value
    elif depth == 0:
        return
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_of(item, depth - 1)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_of(item, depth - 1)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from tensors_of(getattr(value, f.name), depth - 1)


_LAST_GOOD = 2
"""Gradients before the first bad one whose modules are suspected too."""


class Survey:
    """The first look at a bad step: every module call with the ranges of its inputs, outputs and their gradients."""

    def __init__(self, model: nn.Module, forward: bool = True) -> None:
        self.ranges = Ranges()
        self._forward = forward
        """Look at the forward too; where the loss is finite, the gradients tell."""
        self.calls: list[Call] = []
        self._stack = CallStack(model)
        self._in_backward = False
        self._order = 0
        self.added_up = False
        """The loss is a sum, as far as its graph shows."""

    @contextmanager
    def watching(self) -> Iterator[Survey]:
        with self._stack.following(on_leave=self._leave):
            yield self

    def backward_begins(self, loss: Tensor) -> None:
        self._in_backward = True
        self.added_up = is_added_up(loss)

    def _leave(self, call: Call, inputs: Any, kwargs: Any, output: Any) -> None:
        if self._in_backward:  # the recomputation of a checkpointed part: the same call once more
            return
        self.calls.append(call)
        for tensor in tensors_of((inputs, kwargs)):
            call.inputs.append(self.ranges.take(tensor, self._forward))
        for tensor in tensors_of(output):
            call.outputs.append(self.ranges.take(tensor, self._forward))
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(self._on_gradient(call))

    def _on_gradient(self, call: Call) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            self._order += 1
            call.gradients.append((self._order, self.ranges.take(gradient)))

        return look

    # -- reading it ------------------------------------------------------------------------------------------------------------

    def worst_in(self, call: Call) -> tuple[bool, bool]:
        """Whether anything that went in holds NaN, Inf."""
        ranges = [self.ranges.of(i) for i in call.inputs]
        return any(r.nan for r in ranges), any(r.inf for r in ranges)

    def worst_out(self, call: Call) -> tuple[bool, bool]:
        ranges = [self.ranges.of(i) for i in call.outputs]
        return any(r.nan for r in ranges), any(r.inf for r in ranges)

    def newly_bad(self) -> list[Call]:
        """Calls that made a NaN from none, or an Inf from none, inner ones before those around them."""
        found = []
        for call in self.calls:
            nan_in, inf_in = self.worst_in(call)
            nan_out, inf_out = self.worst_out(call)
            if (nan_out and not nan_in) or (inf_out and not inf_in and not nan_in):
                found.append(call)
        return found

    def first_bad_gradients(self) -> list[Call]:
        """The call whose output's gradient was bad first in backward, and those whose gradients were the last good ones before
        it: a module whose output's gradient is good may have made the bad one of its input."""
        events = sorted(
            ((order, i, call) for call in self.calls for order, i in call.gradients if i is not None), key=lambda e: e[0]
        )
        first = next((place for place, (_, i, _) in enumerate(events) if self.ranges.of(i).bad), None)
        return [] if first is None else [call for _, _, call in events[max(0, first - _LAST_GOOD) : first + 1][::-1]]
