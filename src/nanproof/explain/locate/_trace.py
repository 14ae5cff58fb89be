"""The second look: the operations inside the guilty modules, one by one.

A dispatch mode sees every operation below autograd, forward and backward. Only those of the chosen calls are looked at, and of
these only the ones at which something turned bad are kept with their numbers. A backward operation is mapped to the
forward operation whose gradient it computes by autograd's sequence numbers; one that a checkpointed part runs again inside
backward, to the operation of the forward that it repeats.
"""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

import nanproof
from nanproof.explain.locate._calls import GOOD, Call, CallStack, Range, ranges_of

_TORCH = str(Path(torch.__file__).parent) + os.sep
_PACKAGE = str(Path(nanproof.__file__).parent)
_OURS = tuple(str(Path(_PACKAGE) / part) for part in ("core", "explain", "integrations", "_guard.py", "_preflight.py"))
_LARGEST = 1 << 28
"""Bytes of a tensor that is kept, at the most; of one that is kept although nothing is bad, a quarter."""
_KEPT_BYTES = 1 << 30
"""Bytes that are kept of one trace where something is bad; of the rest, as much again."""
_KEPT_OPS = 24
"""Operations at which something turned bad that are kept with their numbers."""
_WAITING_OPS = 256
"""Operations whose numbers are looked at together, at the most: one wait for the device instead of one each."""
_WAITING_BYTES = 1 << 26
"""Bytes of tensors that are held for it, at the most."""
_NODES = 64
"""Backward nodes after which what waits is looked at: if the origin was among them, the rest is not run."""
_WORTH_KEEPING = frozenset(
    "acos acosh asin atanh _cdist_forward _euclidean_dist div div_ exp exp2 exp_ expm1 linalg_vector_norm norm log log10 log1p "
    "log2 xlogy pow reciprocal rsqrt sqrt std var var_mean std_mean where logsumexp clamp clamp_max clamp_min minimum relu "
    "masked_fill mul add sub rsub _ctc_loss multinomial _softmax _log_softmax _linalg_svd _linalg_eigh linalg_qr linalg_eig "
    "_weight_norm_interface".split()
)
"""Operations whose numbers are kept even if nothing is bad: their backward may be, or they may be why a gradient is large."""


@dataclass(eq=False, slots=True)
class Operand:
    """A tensor that went into an operation or came out of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    known: Range | None = None
    producer: Op | None = None
    """The traced operation that wrote it last."""
    value: Tensor | None = None
    """A copy, where something turned bad."""
    requires_grad: bool = False

    @property
    def range(self) -> Range:
        """Taken at once for what comes out, and for what goes into an operation that turns bad; for the rest only if its
        numbers were kept. Nothing bad went into an operation of which nothing bad came out, as far as anyone cares."""
        if self.known is None:
            if self.value is None:
                return GOOD  # not for good: its numbers may be kept later
            self.known = _range(self.value)
        return self.known


@dataclass(eq=False, slots=True)
class Op:
    """One operation of the step."""

    number: int
    name: str
    """aten's name without overload: "exp", "_softmax"."""
    call: Call | None
    source: str
    """file:line of the caller outside torch."""
    backward: bool
    inputs: list[Operand]
    scalars: list[Any]
    outputs: list[Operand] = field(default_factory=list)
    of: Op | None = None
    """For a backward operation: the forward operation it belongs to; for a repeated one: the one it repeats."""
    consumers: list[Op] = field(default_factory=list)
    node: str = ""
    """For a backward operation: autograd's name of the node, "SqrtBackward0"."""

    @property
    def path(self) -> str:
        return self.call.path if self.call is not None else "loss_fn"

    @property
    def forward(self) -> Op:
        """The forward operation: itself, or the one it is the backward or the repetition of."""
        return self.of if self.of is not None else self

    @property
    def nan_out(self) -> bool:
        return any(o.range.nan for o in self.outputs)

    @property
    def inf_out(self) -> bool:
        return any(o.range.inf for o in self.outputs)

    @property
    def bad(self) -> bool:
        return any(o.range.bad for o in self.outputs)

    @property
    def comes_in(self) -> bool:
        """Bad because of something that no traced operation made: the batch, a weight."""
        bad = [i for i in self.inputs if i.range.bad]
        return self.bad and bool(bad) and all(i.producer is None for i in bad)

    @property
    def newly_bad(self) -> bool:
        nan_in, inf_in = any(i.range.nan for i in self.inputs), any(i.range.inf for i in self.inputs)
        return (self.nan_out and not nan_in) or (self.inf_out and not inf_in and not nan_in)


@dataclass(eq=False, slots=True)
class _Waiting:
    """An operation with its tensors, until its numbers are looked at."""

    op: Op
    tensors: list[Tensor]
    outputs: list[Tensor]
    wrote: bool
    """Into its arguments; `before` is what they held."""
    before: list[Tensor]
    node: int
    """How many backward nodes had begun."""


class Enough(Exception):
    """Ends a backward in which what was looked for has been found."""


class Trace(TorchDispatchMode):
    """Records the operations of the chosen calls (their own ones, not those of calls inside), or of all with `calls=None`.

    What runs outside every module call, the loss function's own code, is always recorded.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Compiled code runs eagerly in a replay: no need for torch to load the compiler (seconds) and ask it at every
        operation."""
        return False

    def __init__(self, model: nn.Module, calls: set[int] | None) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.failed: Op | None = None
        """The operation that raised."""
        self._stack = CallStack(model)
        self._calls = calls
        self._count = 0
        self._waiting: list[_Waiting] = []
        """Operations whose numbers were not looked at yet."""
        self._waiting_bytes = 0
        self._writers: dict[int, list[tuple[int, Op]]] = {}
        """By storage: the operations that wrote to it since it was allocated, and where."""
        self._by_sequence: dict[tuple[Any, int], Op] = {}
        """By autograd's sequence numbers, which each thread counts for itself: a part that is checkpointed reentrantly is
        computed again, and gets its graph, in the thread of backward, so what is in there has its own."""
        self._reentrant = False
        self._forward: dict[Any, list[Op]] | None = None
        """Operations of the forward, to find again those that are repeated; None until one is."""
        self._in_backward = False
        self._active = False
        self._node = -1
        """The sequence number of the backward node that is running."""
        self._nodes = self._looked_at = 0
        """Backward nodes begun so far, and those whose operations were looked at."""
        self._born = self._last_bad = False
        """Whether something bad was born in the node that was looked at last, and came out of it."""
        self._enough = False
        self._kept = 0
        self._bytes = [0, 0]

    @contextmanager
    def recording(self) -> Iterator[Trace]:
        """Forwards outside the chosen calls run without the mode, which would cost 20 microseconds an operation."""
        on_enter = on_leave = None
        if self._calls is not None:
            on_enter = self._look_at
            on_leave = self._look_at_parent
        with self._stack.following(on_enter, on_leave):
            self._switch(True)
            try:
                yield self
            finally:
                self._switch(False)
                self._look()

    def backward_begins(self, _loss: Tensor | None = None) -> None:
        self._in_backward = True

    def _look_at(self, call: Call | None) -> None:
        self._switch(call is None or self._calls is None or call.number in self._calls or self._in_backward)

    def _look_at_parent(self, call: Call, *_: Any) -> None:
        self._look_at(call.parent)

    def _switch(self, on: bool) -> None:
        if on and not self._active:
            self._active = True
            self.__enter__()
        elif not on and self._active and _get_current_dispatch_mode() is self:  # else a mode of the user's lies on top
            self._active = False
            self.__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = _KINDS.get(func) or _kind_of(func)
        backward = self._in_backward and not torch.is_grad_enabled()
        of, node = None, None
        outside = False
        if backward:
            node = torch._C._current_autograd_node()
            if node is not None:
                of = self._of_node(node)
                if (sequence := node._sequence_nr()) != self._node:
                    self._next_node(sequence)
            outside = of is None and self._calls is not None
        elif self._calls is not None:
            outside = (call := self._stack.current) is not None and call.number not in self._calls
        if outside or kind.view:
            if kind.writes and self._waiting:
                self._look()
            return func(*args, **kwargs)
        return self._record(func, kind, args, kwargs, backward, of, node)

    def _next_node(self, sequence: int) -> None:
        """Backward goes on to another node. If something bad was born in an earlier one and got out, the rest is not needed."""
        self._node = sequence
        self._nodes += 1
        if self._calls is not None:
            if self._waiting and self._nodes - self._waiting[0].node >= _NODES:
                self._look()
            if self._enough:
                raise Enough

    def _record(self, func: Any, kind: _Kind, args: Any, kwargs: Any, backward: bool, of: Op | None, node: Any) -> Any:
        tensors, scalars = _arguments(args, kwargs)
        inputs = [Operand(tuple(t.shape), t.dtype, requires_grad=t.requires_grad) for t in tensors]
        before: list[Tensor] = []
        if kind.writes and tensors:  # what is in there now is gone afterwards
            self._look()
            for operand, known in zip(inputs, ranges_of(tensors), strict=True):
                operand.known = known
            before = [t.detach().clone() for t in tensors] if self._kept < _KEPT_OPS else []
        source = of.source if of is not None else source_of_operation()
        op = Op(self._count, kind.name, self._stack.current, source, backward, inputs, scalars, of=of)
        if backward:
            op.call = of.call if of is not None else None
            op.node = node.name() if node is not None else ""
        try:
            out = func(*args, **kwargs)
        except Exception:
            self._look()
            self.failed = op
            for operand, tensor, known in zip(inputs, tensors, ranges_of(tensors), strict=True):
                operand.known = known
                self._find_producer(operand, tensor)
            self._keep_values(op, tensors, [])
            self.ops.append(op)
            raise
        if kind.uninitialised:
            return out
        written = tensors if kind.writes else []
        outputs = list(_flat(out)) or written
        op.outputs = [Operand(tuple(t.shape), t.dtype, requires_grad=t.requires_grad) for t in outputs]
        self._count += 1
        repeated = self._in_backward and not backward
        if not backward and not repeated:
            sequence = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
            self._by_sequence.setdefault((None, sequence), op)
        self._waiting.append(_Waiting(op, tensors, outputs, bool(written), before, self._nodes))
        self._waiting_bytes += sum(t.nbytes for t in (*tensors, *outputs) if t.layout is torch.strided)
        if written or repeated or len(self._waiting) >= _WAITING_OPS or self._waiting_bytes > _WAITING_BYTES:
            self._look()
        if repeated:
            self._note_repeated(op)
        return out

    def _look(self) -> None:
        """Look at the numbers of the operations that wait, all in one go. Nothing was written into them since: whatever writes
        asks for this first."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        if not waiting or self._enough:
            return
        made = [(o, t) for w in waiting for o, t in zip(w.op.outputs, w.outputs, strict=True)]
        ranges = ranges_of([t for _, t in made])
        for (operand, _), known in zip(made, ranges, strict=True):
            operand.known = known
        # Whatever goes into an operation that is not bad is of no interest.
        taken = [(o, t) for w in waiting if not w.wrote and w.op.bad for o, t in zip(w.op.inputs, w.tensors, strict=True)]
        there = {id(t): known for (_, t), known in zip(made, ranges, strict=True)}
        missing = list({id(t): t for _, t in taken if id(t) not in there}.values())
        there |= {id(t): known for t, known in zip(missing, ranges_of(missing), strict=True)}
        for operand, tensor in taken:
            operand.known = there[id(tensor)]
        for each in waiting:
            if self._calls is not None and each.node != self._looked_at and self._born and self._last_bad:
                self._enough = True
                return
            self._note(each)

    def _note(self, each: _Waiting) -> None:
        """Take down an operation whose numbers are known."""
        op, tensors, outputs = each.op, each.tensors, each.outputs
        if each.node != self._looked_at:
            self._looked_at, self._born, self._last_bad = each.node, False, False
        stores = [t.untyped_storage().data_ptr() if t.layout is torch.strided else None for t in tensors]
        for operand, tensor, store in zip(op.inputs, tensors, stores, strict=True):
            if store in self._writers:
                self._find_producer(operand, tensor)
        self.ops.append(op)
        bad = op.bad
        if op.backward:
            self._born, self._last_bad = self._born or (bad and op.newly_bad), bad
        for producer in {id(i.producer): i.producer for i in op.inputs if i.producer is not None}.values():
            producer.consumers.append(op)
        for tensor in outputs:
            if tensor.layout is torch.strided:
                self._note_write(tensor, op, each.wrote, stores)
        if bad and self._kept < _KEPT_OPS and (op.newly_bad or op.comes_in):
            self._kept += 1
            self._keep_values(op, each.before if each.before and len(each.before) == len(tensors) else tensors, outputs)
        elif op.of is None and not op.backward and op.name in _WORTH_KEEPING:
            self._keep_values(op, tensors, outputs, _LARGEST // 4)

    def _note_repeated(self, op: Op) -> None:
        """An operation with a gradient that runs inside backward: a checkpointed part is computed again."""
        if self._forward is None:
            self._forward = {}
            for first in self.ops:
                if not first.backward and first is not op:
                    self._forward.setdefault(_alike(first), []).append(first)
        alike = self._forward.setdefault(_alike(op), [])
        sequence = torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]
        node = torch._C._current_autograd_node()
        if node is None:
            alike.append(op)
            self._by_sequence.setdefault((None, sequence), op)
            return
        op.of = self._repeated(op, alike, node)
        op.call = op.of.call if op.of is not None else op.call
        if isinstance(node, BackwardCFunction):  # otherwise what is computed again gets no backward of its own
            self._by_sequence.setdefault((_identity(node), sequence), op.forward)
            self._reentrant = True

    def _of_node(self, node: Any) -> Op | None:
        """The forward operation that a node of backward belongs to."""
        return self._by_sequence.get((_around(node) if self._reentrant else None, node._sequence_nr()))

    def _repeated(self, op: Op, alike: list[Op], node: Any) -> Op | None:
        """The operation of the forward that a checkpointed part runs again: the same line, with the same numbers coming out.

        Of several it is the nearest to the node that asked for it: a reentrant part has a node of its own, which comes before
        its operations; otherwise the first node of backward that needs what the part did not keep, which comes after them.
        """
        asked = self._of_node(node)
        reentrant = isinstance(node, BackwardCFunction)
        able = [first for first in alike if _same_results(first, op) and (op.call is None or _same_module(first, op))]
        if asked is not None:
            able = [first for first in able if (first.number >= asked.number if reentrant else first.number <= asked.number)]
        return able[0 if reentrant else -1] if able else None

    def _note_write(self, tensor: Tensor, op: Op, in_place: bool, inside: list[int | None]) -> None:
        storage = tensor.untyped_storage().data_ptr()
        if in_place and storage in self._writers:
            self._writers[storage].append((tensor.data_ptr(), op))
        elif in_place or storage not in inside:  # else it only looks at what went in
            self._writers[storage] = [(tensor.data_ptr(), op)]

    def _find_producer(self, operand: Operand, tensor: Tensor) -> None:
        """Several may have written to parts of it: for something bad, the last that wrote something bad, best at this place."""
        if tensor.layout is not torch.strided:
            return
        writers = self._writers.get(tensor.untyped_storage().data_ptr(), [])
        able = [w for w in writers if w[1].bad] if operand.known is not None and operand.known.bad else writers
        here = [w for w in able if w[0] == tensor.data_ptr()]
        operand.producer = next((op for _, op in reversed(here or able)), None)

    def _keep_values(self, op: Op, tensors: list[Tensor], outputs: list[Tensor], largest: int = _LARGEST) -> None:
        for operand, tensor in (*zip(op.inputs, tensors, strict=False), *zip(op.outputs, outputs, strict=False)):
            size = tensor.numel() * tensor.element_size()
            purse = int(largest < _LARGEST)
            if size <= largest and self._bytes[purse] + size <= _KEPT_BYTES and tensor.layout is torch.strided:
                self._bytes[purse] += size
                operand.value = tensor.detach().clone()


def _range(tensor: Tensor) -> Range:
    return ranges_of([tensor])[0]


def _alike(op: Op) -> Any:
    return op.name, op.source, *(i.shape for i in op.inputs)


def _identity(node: Any) -> tuple[int, int]:
    return id(node), node._sequence_nr()


def _around(node: Any) -> tuple[int, int] | None:
    """The reentrantly checkpointed part whose backward, on this thread's stack, runs this node; None outside of one."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__ and (outer := frame.f_locals["self"]) is not node:
            return _identity(outer)
        frame = frame.f_back
    return None


def _same_results(a: Op, b: Op) -> bool:
    return [repr(o.range) for o in a.outputs] == [repr(o.range) for o in b.outputs]  # NaN reads like NaN


def _same_module(a: Op, b: Op) -> bool:
    return a.call is not None and b.call is not None and a.call.module is b.call.module


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a trace has to know about an operator, found out once."""

    name: str
    view: bool
    writes: bool
    """Into one of its arguments."""
    uninitialised: bool
    """What is in the memory it returns means nothing."""


_UNINITIALISED = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted"}
_KINDS: dict[Any, _Kind] = {}


def _kind_of(func: Any) -> _Kind:
    name, returns = func.__name__.split(".")[0], func._schema.returns
    view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    kind = _KINDS[func] = _Kind(name, view, writes(func), name in _UNINITIALISED)
    return kind


@cache
def writes(func: Any) -> bool:
    """Whether an operation writes into one of its arguments."""
    return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)


def _arguments(args: Any, kwargs: Any) -> tuple[list[Tensor], list[Any]]:
    tensors: list[Tensor] = []
    scalars: list[Any] = []
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)) and any(isinstance(v, Tensor) for v in value):
            tensors += [v for v in value if isinstance(v, Tensor)]
        else:
            scalars.append(value)
    return tensors, scalars


def _flat(out: Any) -> Iterator[Tensor]:
    if isinstance(out, Tensor):
        yield out
    elif isinstance(out, (tuple, list)):
        for item in out:
            yield from _flat(item)


def source_of_operation() -> str:
    """The line that called the operation: the first frame outside torch and this package."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if is_users(name):
            return f"{short(name)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


@cache
def is_users(name: str) -> bool:
    """A file that is neither torch's nor ours; a notebook's cell is one, where its source is known."""
    return not name.startswith((_TORCH, *_OURS)) and (not name.startswith("<") or name in linecache.cache)


@cache
def short(name: str) -> str:
    """A file as a person would look for it: under its package, or relative to where the run was started."""
    if name.startswith(_PACKAGE):
        return os.path.relpath(name, Path(_PACKAGE).parent)
    marker = f"site-packages{os.sep}"
    if marker in name:
        return name.split(marker, 1)[1]
    try:
        relative = os.path.relpath(name)
    except ValueError:
        return name
    return name if relative.startswith("..") else relative


def source_line(source: str) -> str:
    """The text of a `file:line`, if it can be read."""
    name, _, number = source.rpartition(":")
    return linecache.getline(name, int(number)).strip() if name and number.isdigit() else ""
