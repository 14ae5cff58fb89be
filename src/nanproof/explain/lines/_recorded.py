"""RootRecorder: what a raw loop gives its model, so that a bad step can be run again although
nobody handed over its batch.

A raw loop calls its model as it likes and gives backward a loss. Where that loss is the model's own
output (the output itself, its `loss`, one of its items), perhaps divided or multiplied by a number,
the call is all that is needed: the arguments are the batch, and calling the model again is the
loss function. Otherwise the loop's own lines are run again (`nanproof.explain.lines`), and where
they must not be, the incident says which line is in the way.

This may differ from rank to rank, if a loss is put together from what a batch happens to hold.
Ranks must act alike, because one that runs a step again waits for the others. So the engine asks
them once a step was refused (`RECORDED`). Where verdicts come late (CUDA) it
is too late by then: steps behind the bad one were taken. There, and with a loss scale, several
ranks get names and no cause; `Policy(lag=0)` reads verdicts at once.
"""

from __future__ import annotations

import copy
import logging
import math
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn

from nanproof._errors import NanproofError, UsageError
from nanproof.core._engine import Loop
from nanproof.core._under_way import UNKNOWN, WRITES, Again
from nanproof.core.judge._parameters import unwrap
from nanproof.core.support._context import RandomState
from nanproof.core.support._hooks import Hook
from nanproof.core.support._tree import all_tensors, map_tensors, tensors_in
from nanproof.explain.lines._lines import Inputs, Lines, Op, finiteness
from nanproof.explain.lines._slice import carries_graph

log = logging.getLogger("nanproof")

_LONGEST = 4
"""Divisions and multiplications between the model's loss and that of backward."""

OUTSIDE = "the loss is made outside the model, so the step cannot be run again; return it from forward, or use guard.train_step"
NUMERICAL = (RuntimeError, ValueError, ArithmeticError, AssertionError)
"""What a bad number makes code raise."""
FORWARD = "*"
"""In place of the output that is the loss: all of the model's output is looked at."""
RECORDED = Loop(begins=True, goes_back=False, ranks_differ=True, leaves=False, why_not_again=OUTSIDE)
"""A raw loop whose batches come from a recorder."""


class Call(dict[str, Any]):
    """One call of a model: "args", "kwargs", and how the loss is got from its output: "loss"."""

    module: weakref.ref[nn.Module]
    written = False
    """Whether the step writes into its batch, so that every rerun needs a copy."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __copy__(self) -> Call:
        other = Call(self)
        other.module, other.written = self.module, self.written
        return other

    @contextmanager
    def watched(self) -> Iterator[Callable[[], bool]]:
        """While open, look at the next call of the module; what this gives returns whether it was like this one."""
        seen: list[bool] = []

        def compare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not seen:
                mine, theirs = (list(tensors_in(call)) for call in ((self["args"], self["kwargs"]), (args, kwargs)))
                seen.append(len(mine) == len(theirs) and all(_same(a, b) for (_, a), (_, b) in zip(mine, theirs, strict=True)))

        module = self.module()
        hook = None if module is None else module.register_forward_pre_hook(compare, with_kwargs=True)
        try:
            yield lambda: seen == [True]
        finally:
            if hook is not None:
                hook.remove()


class RootRecorder:
    """Notes the calls of a model that trains. One that evaluates, under no_grad, goes by
    unnoticed."""

    def __init__(self, models: nn.Module | Sequence[nn.Module], begin: Callable[[Any], None]) -> None:
        """
        Args:
            models: the modules that the loop calls, with all their wrappers. A call of one inside a call of another is part
                of that.
            begin: called with the batch just before the first forward of each backward: `Engine.begin`.
        """
        several = [models] if isinstance(models, nn.Module) else list(models)
        self._known_models = {id(model): weakref.ref(model) for model in several}
        self._names = weakref.WeakKeyDictionary({model: type(unwrap(model)).__name__ for model in several})
        self._begin = begin
        self._calls: list[Call] = []
        """Since the last backward. Of those in eval mode only the last."""
        self._told = True
        """Whether `begin` knows of the last call."""
        self._losses: list[tuple[Any, Tensor]] = []
        """What the last call returned that could be its loss, and how to get at it."""
        self._given: list[tuple[Tensor, int]] = []
        """The tensors of the last call, and how often each had been written before it."""
        self._recent: deque[list[tuple[weakref.ref[Tensor], int]]] = deque(maxlen=8)
        self._copies = False
        """Whether a copy of the arguments is kept: where the loop uses one buffer for all its
        batches, or the model writes."""
        self._copied: dict[int, tuple[Tensor, Tensor]] = {}
        """Tensors of the last call, by id, each with its copy."""
        self._recognised: list[Call] = []
        self.recognised = False
        """Whether the loss of the last backward was the model's own output."""
        self._again = False
        self._first: Call | None = None
        """The first call since the last backward."""
        self._inside: nn.Module | None = None
        """The model whose forward is running."""
        self._outer: tuple[int, CodeType] | None = None
        """The frame that calls it, by its id, and its code."""
        self.lines = Lines()
        self.random: RandomState | None = None
        """The random numbers before this backward's first call, where that is not the first of the step."""
        self.paused = False
        """Set while another guard runs the model again."""
        self._hooks = [
            hook
            for model in several
            for hook in (
                model.register_forward_pre_hook(Hook(self, self._before), with_kwargs=True),
                model.register_forward_hook(Hook(self, self._after), always_call=True),
            )
        ]

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Those that were made for the backward last asked about, and may be looked at after it; of
        many, the last two."""
        return list(self._recognised)

    @property
    def calls_now(self) -> list[dict[str, Any]]:
        """Those since the last backward."""
        return list(self._calls or self._recognised)

    def source_of(
        self,
        loss: Tensor,
        then: Iterable[Op] = (),
        frame: FrameType | None = None,
        argument: str = "",
        late: bool = False,
    ) -> Again:
        """Just before backward: how its loss can be computed again. `then` is what the framework
        itself still does to the loss; `frame` and `argument`: see `Lines.at_backward`. `late`: verdicts
        come late, and a step that a call of the model stands for can be held."""
        frame = sys._getframe(1) if frame is None else frame
        try:
            return self._source_of(loss, then, frame, argument, late)
        except NanproofError:
            raise
        except Exception as error:  # somebody's objects: what goes wrong with them is a reason not to run the step again
            log.debug("nanproof: what leads to a loss could not be followed", exc_info=True)
            return Again(UNKNOWN, whole=False, why_not=f"what leads to the loss could not be followed: {error!r}"[:200])

    def _source_of(self, loss: Tensor, then: Iterable[Op], frame: FrameType, argument: str, late: bool) -> Again:
        then = tuple([op for op in then if op[1] != 1])
        copied = self._copies
        self.recognised = self.recognise(loss, then)
        calls = self._recognised
        if self._copies and not copied and len(calls) == 1:
            self.lines.forget()
            calls[0]["loss"], calls[0].written = [FORWARD], True
            return Again(calls[0], whole=False, why_not=WRITES, written=True)
        if self.recognised and (late or all(math.isfinite(number) and number for _, number in calls[0]["loss"][1:])):
            self.lines.forget()
            return Again(calls[0])
        found = self.lines.at_backward(frame, argument, then)
        if self.recognised and not isinstance(found, Inputs):
            return Again(calls[0])
        if isinstance(found, Inputs):
            self.recognised = False  # the loop divides by 0, and its lines say where
            found.random, self.random = self.random, None
            if self._copied:
                found = map_tensors(found, lambda t: self._copied.get(id(t), (t, t))[1])
                found.written, self._copied = True, {}
            if found.chain.draws_first:
                found.called, found.draws_anew = self._first, self._first is None
            return Again(found)
        if self.lines.gave_up:
            calls = self._recognised = calls[-1:]
        if len(calls) == 1:
            forward = copy.copy(calls[0])
            forward["loss"] = [FORWARD]
            return Again(forward, whole=False, why_not=str(found))
        return Again(UNKNOWN, whole=False, why_not=str(found))

    def source_of_error(self, error: BaseException) -> Again:
        """How what raised in this step can be run again."""
        self._recognised, self._calls, self._losses, self._told = self._calls, [], [], True
        found = self.lines.at_error(error)
        if isinstance(found, Inputs):
            found.random, found.called = self.random, self._first
            return Again(found)
        return Again(UNKNOWN, whole=False, why_not=str(found))

    def recognise(self, loss: Tensor, then: Iterable[Op] = ()) -> bool:
        """Just before backward: whether its loss is the last call's own, so that the call can stand
        for the micro-batch."""
        calls, self._calls = self._calls, []
        self._recognised = calls
        losses, self._losses = self._losses, []
        told, self._told = self._told, True
        given, self._given = self._given, []
        if len(calls) != 1:
            return False
        for t, count in given:
            if t._version != count:
                self._copies = True
                return False
        for where, found in losses:
            ops = _between(found, loss)
            if ops is not None:
                calls[0]["loss"] = [where, *ops, *then]
                if not told:
                    self._begin(calls[0])
                return True
        return False

    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor:
        """Do again what the loop did with a batch."""
        self._again = True
        try:
            if isinstance(batch, Inputs):
                return batch.run()
            called = batch.module() if isinstance(batch, Call) else None
            return call_again(called if called is not None and len(self._names) > 1 else model, batch)
        finally:
            self._again = False

    def _copy(self, tensor: Tensor) -> Tensor:
        if tensor.requires_grad:
            return tensor
        copy = tensor.clone()
        self._copied[id(tensor)] = tensor, copy
        return copy

    def forget(self) -> None:
        """The step is over: what was called for it is of no interest any more."""
        self._calls, self._losses, self._given = [], [], []
        self._told, self._first, self._inside = True, None, None
        self.lines.forget()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._calls, self._recognised, self._losses, self._given = [], [], [], []
        self.lines = Lines()

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._counts(module):
            return
        frame = sys._getframe(2)
        if self._inside is not None and not _is_above(self._outer, frame):
            self.forget()  # it was interrupted, and torch called no hook
        if self._inside is None:
            self._inside, self._outer = module, (id(frame), frame.f_code)
            self.note(module, args, kwargs, frame)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if module is self._inside:
            self._inside = None
            try:
                if isinstance(output, Tensor):
                    self._losses = [(None, output)] if output.numel() == 1 and output.requires_grad else []
                else:
                    self._losses = list(_candidates(output))
            except Exception:  # an object of the loop's own that raises when it is looked at
                self._losses = []

    def _counts(self, module: nn.Module) -> bool:
        if self._again or self.paused or torch._C._get_tracing_state() or not torch.is_grad_enabled():
            return False
        known = self._known_models.get(id(module))  # a shallow copy of a model has its hooks
        return known is not None and known() is module

    def note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], frame: FrameType | None) -> None:
        """A model is called."""
        self.lines.model_called(frame)
        given: Any = (args, dict(kwargs))
        tensors = _given_tensors(args, kwargs)
        if not self._copies:
            for call in self._recent:
                for reference, count in call:
                    if (t := reference()) is not None and t._version != count:
                        self._copies = True
        self._recent.append([(weakref.ref(t), count) for t, count in tensors])
        if self._copies:
            self._copied = {}
            given = map_tensors(given, self._copy)
            tensors = [(t, t._version) for t in all_tensors(given) if not t.is_inference()]
        batch = Call({"args": given[0], "kwargs": given[1], "loss": None})
        batch.module, batch.written = weakref.ref(module), self._copies
        if len(self._known_models) > 1 and len(self._names) > 1:
            batch["of"] = self._names[module]
        self._given = tensors
        if not self._told:
            self._calls.pop()
        first = not self._calls
        if first:  # what carries a graph would keep it alive
            self._first = batch if self.lines.draws_first and not _carries_graph(args, kwargs) else None
        self._calls = [*self._calls[-1:], batch]  # two are too many already: no more are kept alive
        # A forward in eval mode is hardly the beginning of a step. If backward comes to it after all, it was.
        self._told = module.training
        if self._told and first:
            self._begin(batch)


def _given_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[Tensor, int]]:
    """The tensors of a call, and how often each was written."""
    given = [*args, *kwargs.values()] if kwargs else args
    for value in given:
        if not isinstance(value, Tensor):
            given = all_tensors((args, kwargs))
            break
    return [(t, t._version) for t in given if not (t.is_inference() or t.is_nested)]


def _carries_graph(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    for value in (*args, *kwargs.values()):
        if value.grad_fn is not None if isinstance(value, Tensor) else carries_graph(value, 1):
            return True
    return False


def _same(a: Tensor, b: Tensor) -> bool:
    if a is b or a.layout is not torch.strided:
        return True
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())


def _is_above(outer: tuple[int, CodeType] | None, frame: FrameType) -> bool:
    """Whether this frame is among the callers of another."""
    above = frame.f_back
    while above is not None and outer is not None:
        if id(above) == outer[0] and above.f_code is outer[1]:
            return True
        above = above.f_back
    return False


def call_again(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a recorded call, as its backward got it: a loss function for `nanproof replay` too."""
    if not isinstance(batch, Mapping) or not batch.get("loss"):
        raise UsageError("call_again(): this is not a recorded call of a model, or its loss was not the model's own")
    where, *ops = batch["loss"]
    output = model(*batch["args"], **batch["kwargs"])
    if where == FORWARD:
        return finiteness(output)
    loss: Tensor = output if where is None else getattr(output, where[1:]) if str(where).startswith(".") else output[where]
    for op, number in ops:
        loss = loss / number if op == "/" else loss * number
    return loss


call_again.weighted = True  # type: ignore[attr-defined]  # what the loop divided by is among the operations


def _candidates(output: Any) -> Iterator[tuple[Any, Tensor]]:
    """(where, scalar) for what could be a loss: None is the output itself, ".loss" an attribute,
    else a key or an index."""
    found: list[tuple[Any, Any]] = []
    if isinstance(output, Tensor):
        found.append((None, output))
    elif isinstance(output, Mapping):
        found.append(("loss", output.get("loss")))
    else:
        found.append((".loss", getattr(output, "loss", None)))
        if isinstance(output, (tuple, list)):
            found += enumerate(output)
    for where, value in found:
        if isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad:
            yield where, value


def _between(found: Tensor, loss: Tensor) -> list[Op] | None:
    """How one became the other, in divisions and multiplications by numbers; None if in another
    way. Asks the graph, so that nothing has to be read from the device."""
    ops: list[Op] = []
    if loss is found:
        return ops
    (node, output), end = (loss.grad_fn, loss.output_nr), (found.grad_fn, found.output_nr)
    while node is not None and len(ops) <= _LONGEST:
        if (node, output) == end:
            return ops[::-1]
        op = {"DivBackward0": "/", "MulBackward0": "*"}.get(node.name())
        others = [n for n, _ in node.next_functions[1:] if n is not None]
        try:
            other = getattr(node, "_saved_other", None)
        except RuntimeError:  # backward has run, and freed it
            return None
        if op is None or others or not isinstance(other, Tensor) or other.dim() or other.device.type != "cpu":
            return None
        ops.append((op, float(other)))
        node, output = node.next_functions[0]
    return None
