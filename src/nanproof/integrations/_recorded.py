"""RootRecorder: what a raw loop gives its model, so that a bad step can be run again although
nobody handed over its batch.

A raw loop calls its model as it likes and gives backward a loss. Where that loss is the model's own
output (the output itself, its `loss`, one of its items), perhaps divided or multiplied by a number,
the call is all that is needed: the arguments are the batch, and calling the model again is the
loss function. If the loss is made of something else, the step cannot be run again, and the incident
says so.

This may differ from rank to rank, if a loss is put together from what a batch happens to hold.
Ranks must act alike, because one that runs a step again waits for the others. So the engine asks
them once a step was refused (`RECORDED`). Where verdicts come late (CUDA) it
is too late by then: steps behind the bad one were taken. There, and with a loss scale, several
ranks get names and no cause; `Policy(lag=0)` reads verdicts at once.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nanproof._errors import UsageError
from nanproof.core._engine import Loop
from nanproof.core._under_way import UNKNOWN
from nanproof.core.judge._parameters import unwrap
from nanproof.core.support._hooks import Hook
from nanproof.core.support._tree import map_tensors, tensors_in, writes_to_batch

_LONGEST = 4
"""Divisions and multiplications between the model's loss and that of backward."""

OUTSIDE = "the loss is made outside the model, so the step cannot be run again; return it from forward, or use guard.train_step"
RECORDED = Loop(begins=True, goes_back=False, ranks_differ=True, leaves=False, why_not_again=OUTSIDE)
"""A raw loop whose batches come from a recorder."""

Op = tuple[str, float]
"""("/", 2.0) or ("*", 0.5)"""


class RootRecorder:
    """Notes the calls of a model that trains. One that evaluates, under no_grad, goes by
    unnoticed."""

    def __init__(self, model: nn.Module, begin: Callable[[Any], None]) -> None:
        """
        Args:
            model: the module that the loop calls, with all its wrappers.
            begin: called with the batch just before each forward: `Engine.begin`.
        """
        self._model = weakref.ref(model)
        self.name = type(unwrap(model)).__name__
        self._begin = begin
        self._calls: list[dict[str, Any]] = []
        """Since the last backward. Of those in eval mode only the last."""
        self._told = True
        """Whether `begin` knows of the last call."""
        self._losses: list[tuple[Any, Tensor]] = []
        """What the last call returned that could be its loss, and how to get at it."""
        self._found: list[int] = []
        """How often the tensors of the last call had been written before it."""
        self._recent: deque[list[tuple[weakref.ref[Tensor], int]]] = deque(maxlen=8)
        self._copies = False
        """Whether a copy of the arguments is kept: where the loop uses one buffer for all its
        batches, or the model writes."""
        self._recognised: list[dict[str, Any]] = []
        self._again = False
        self.paused = False
        """Set while another guard runs the model again."""
        self._hooks = [
            model.register_forward_pre_hook(Hook(self, self._before), with_kwargs=True),
            model.register_forward_hook(Hook(self, self._after)),
        ]

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Those that were made for the backward last asked about, and may be looked at after it; of
        many, the last two."""
        return list(self._recognised)

    def recognise(self, loss: Tensor, then: Iterable[Op] = ()) -> bool:
        """Just before backward: whether its loss is the last call's own, so that the call can stand
        for the micro-batch. `then` is what the framework itself still does to the loss."""
        calls, self._calls = self._calls, []
        self._recognised = calls
        losses, self._losses = self._losses, []
        told, self._told = self._told, True
        if len(calls) != 1:
            return False
        if writes_to_batch(calls[0]) != self._found:
            self._copies = True
            return False
        for where, found in losses:
            ops = _between(found, loss)
            if ops is not None:
                calls[0]["loss"] = [where, *ops, *(op for op in then if op[1] != 1)]
                if not told:
                    self._begin(calls[0])
                return True
        return False

    def loss_fn(self, model: nn.Module, batch: Any) -> Tensor:
        """Call the model again, and do with its output what the loop did."""
        self._again = True
        try:
            return call_again(model, batch)
        finally:
            self._again = False

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._calls, self._recognised, self._losses = [], [], []

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._counts(module):
            self._note(module, args, kwargs)

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._counts(module):
            self._losses = list(_candidates(output))

    def _counts(self, module: nn.Module) -> bool:
        return not (self._again or self.paused) and torch.is_grad_enabled() and module is self._model()

    def _note(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given: Any = (args, dict(kwargs))
        self._copies |= any(t is not None and t._version != count for call in self._recent for t, count in _alive(call))
        self._recent.append([(weakref.ref(t), t._version) for _, t in tensors_in(given) if not t.is_inference()])
        if self._copies:
            given = map_tensors(given, lambda t: t if t.requires_grad else t.clone())
        batch = {"args": given[0], "kwargs": given[1], "loss": None}
        self._found = writes_to_batch(batch)
        if not self._told:
            self._calls.pop()
        self._calls = [*self._calls[-1:], batch]  # two are too many already: no more are kept alive
        # A forward in eval mode is hardly the beginning of a step. If backward comes to it after all, it was.
        self._told = module.training
        if self._told:
            self._begin(batch if len(self._calls) == 1 else UNKNOWN)


def _alive(call: list[tuple[weakref.ref[Tensor], int]]) -> Iterator[tuple[Tensor | None, int]]:
    return ((tensor(), count) for tensor, count in call)


def call_again(model: nn.Module, batch: Any) -> Tensor:
    """The loss of a recorded call, as its backward got it: a loss function for `nanproof replay` too."""
    if not isinstance(batch, Mapping) or not batch.get("loss"):
        raise UsageError("call_again(): this is not a recorded call of a model, or its loss was not the model's own")
    where, *ops = batch["loss"]
    output = model(*batch["args"], **batch["kwargs"])
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
        other = getattr(node, "_saved_other", None)
        if op is None or others or not isinstance(other, Tensor) or other.dim() or other.device.type != "cpu":
            return None
        ops.append((op, float(other)))
        node, output = node.next_functions[0]
    return None
