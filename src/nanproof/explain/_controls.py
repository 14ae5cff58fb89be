"""Controls that trials share: a fix that would help with another cause as well does not verify this one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from nanproof.explain._case import Case, Trial
from nanproof.explain._growth import growth
from nanproof.explain.locate._locate import Birth
from nanproof.explain.locate._trace import Op, Operand
from nanproof.explain.replay._interventions import Intervention
from nanproof.explain.replay._surroundings import weights_as

HIDES = frozenset({"where", "masked_fill", "masked_fill_", "masked_select", "index", "nan_to_num", "masked_scatter"})
PRODUCTS = frozenset({"mul", "multiply", "__mul__", "__rmul__"})
FP16_ENDS = 65504.0


def rejected(trial: Trial, reason: str) -> Trial:
    """Return the trial, or a failed one where a control gave a reason against it."""
    return Trial(False, f"{trial.result}; but {reason}") if trial.held and reason else trial


# -- a result that does not count ------------------------------------------------------------------------------------------------


def unused(case: Case, one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> str:
    """Say so where the guilty result is hidden or weighted by 0, and other numbers in its place leave the loss as it is."""
    assert case.replay is not None and case.birth is not None
    hider = hidden_by(case.birth.op)
    if hider is None and (weighted_by_0(case.birth.turned) is None or not added_to_the_rest(case)):
        return ""
    first, second = (case.replay.run(change, backward=False).loss for change in (one, other))
    if not math.isclose(first, second, rel_tol=1e-5, abs_tol=1e-9):
        return ""
    why = f"{hider.name} hides its result" if hider is not None else "the weight of its result is 0"
    return f"another number there leaves the loss at {first:.6g}: {why}"


def hidden_by(op: Op) -> Op | None:
    """Return the operation that drops the result in the forward, if there is one."""
    for _ in range(5):
        ahead = [c for c in op.consumers if not c.backward and c.name not in ("_local_scalar_dense", "isfinite", "eq", "ne")]
        for consumer in ahead:
            if consumer.name in HIDES:
                return consumer
        if len(ahead) != 1:
            return None
        op = ahead[0]
    return None


def weighted_by_0(op: Op) -> Operand | None:
    """Return the infinite operand of a product with a weight of 0 that is not learned."""
    infinite = [i for i in op.inputs if i.range.inf and not i.range.nan]
    if op.backward or op.name not in ("mul", "mul_") or len(infinite) != 1:
        return None
    term = infinite[0]
    weight = next((i for i in op.inputs if i is not term), None)
    if weight is None:
        zero = any(isinstance(s, (int, float)) and s == 0 for s in op.scalars)
    elif weight.requires_grad:
        return None
    elif math.prod(weight.shape) == 1:
        zero = weight.range.low == weight.range.high == 0
    else:  # stacked terms, one weight each
        stacked = term.producer is not None and term.producer.name == "stack"
        zero = stacked and weight.shape == term.shape and len(term.shape) == 1
    return term if zero else None


def added_to_the_rest(case: Case) -> bool:
    """Whether the product of 0 and Inf is a term of a sum: 0, 1 and 2 in its place move the loss by the same amount each time."""
    assert case.replay is not None
    none, one, two = (case.replay.run(ProductTaken(value), backward=False).loss for value in (0.0, 1.0, 2.0))
    first, second = one - none, two - one
    return math.isfinite(second) and first != 0 and math.isclose(first, second, rel_tol=1e-2, abs_tol=1e-6)


class ProductTaken(Intervention):
    """The product of a weight of 0 and an infinite term is taken as a constant."""

    names = PRODUCTS | {"__imul__", "stack"}

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value
        self._stacked: dict[int, tuple[Tensor, Sequence[Tensor]]] = {}
        """Stacked terms by id: each has to be left out alone, with its gradient."""

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        if name == "stack":
            out: Tensor = func(*args, **kwargs)
            if out.dim() == 1:
                self._stacked[id(out)] = out, args[0]
            return out
        a, b = args[0], args[1] if len(args) > 1 else kwargs.get("other")
        for weight, term in ((a, b), (b, a)):
            if not isinstance(term, Tensor) or not term.is_floating_point() or not _infinite(term):
                continue
            if _is_0(weight):
                self.acted += 1
                return torch.full_like(term.detach(), self._value)
            if isinstance(weight, Tensor) and weight.shape == term.shape and id(term) in self._stacked:
                parts = zip(self._stacked[id(term)][1], weight.unbind(), strict=True)
                return torch.stack([self.change("mul", torch.mul, (part, one), {}) for part, one in parts])
        return func(*args, **kwargs)


def _is_0(weight: Any) -> bool:
    if isinstance(weight, Tensor):
        return weight.numel() == 1 and not weight.requires_grad and bool(weight == 0)
    return isinstance(weight, (int, float)) and weight == 0


def _infinite(term: Tensor) -> bool:
    value = term.detach()
    return bool(torch.isinf(value).any()) and not bool(torch.isnan(value).any())


# -- weights that the learning rate blew up --------------------------------------------------------------------------------------


def weights_at_their_first_size(case: Case) -> dict[Tensor, Tensor]:
    """Return every weight that has grown since the run began, scaled down to the size it had then."""
    assert case.replay is not None
    at_start, values = case.details.get("largest_at_start") or {}, {}
    for name, p in case.replay.parameters.items():
        now = float(torch.linalg.vector_norm(p.detach(), torch.inf))
        then = at_start.get(name, math.nan)
        if then < now < math.inf:
            values[p] = p.detach() * (then / now)
    return values


def blown_up(case: Case) -> str:
    """Say so where the updates have blown the weights up, and the step is finite with weights of their first size."""
    assert case.replay is not None
    found = growth(case)
    if found is None:
        return ""
    with weights_as(weights_at_their_first_size(case)):
        if not case.replay.run().finite:
            return ""
    return f"with weights of the size they began with nothing overflows: a learning rate of {found.rate:g} made them large"


# -- an overflow of fp16 ---------------------------------------------------------------------------------------------------------


def not_an_overflow(case: Case, birth: Birth) -> str:
    """Say so where the guilty operation, computed in fp32 from the same inputs, is not a number beyond fp16's range."""
    assert case.replay is not None
    wide = _Widened(birth.at.name)
    case.replay.run(wide)
    if wide.largest is None or FP16_ENDS <= wide.largest < math.inf:
        return ""
    return f"{birth.at.name} of the same inputs in fp32 gives {wide.largest:.4g}: it is not an overflow of fp16"


class _Widened(TorchDispatchMode):
    """While open, computes the first operation of a name that goes bad in fp16 once more in fp32."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name
        self.largest: float | None = None
        """The largest number of that result; NaN or Inf where it is bad in fp32 as well."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.largest is not None or func.__name__.split(".")[0] != self._name:
            return func(*args, **kwargs)
        given = [t for t in tree_leaves((args, kwargs)) if _floating(t)]
        finite = all(bool(torch.isfinite(t).all()) for t in given)
        wide = tree_map(_up, (args, kwargs)) if finite else None  # before a function in place writes into them
        out = func(*args, **kwargs)
        made = [t for t in tree_leaves(out) if _floating(t)]
        if wide is not None and any(t.dtype == torch.float16 and not bool(torch.isfinite(t).all()) for t in made):
            results = [t for t in tree_leaves(func(*wide[0], **wide[1])) if _floating(t)]
            self.largest = max(float(t.abs().max()) if bool(torch.isfinite(t).all()) else math.inf for t in results)
        return out


def _floating(t: Any) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point() and t.numel() > 0 and t.layout is torch.strided


def _up(value: Any) -> Any:
    if isinstance(value, Tensor) and value.dtype == torch.float16:
        return value.float()
    return torch.float32 if value is torch.float16 else value
