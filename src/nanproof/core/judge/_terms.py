"""The terms of a loss. A total of NaN hides which of its terms was NaN: here they are added up so that they can be found again.

`weighted_sum` keeps the values of its terms, on the device, at the node of autograd's graph that made the total. `terms_of` finds
them from the loss that backward starts from, whatever was done to it in between. There is no operation of its own in the
graph: value, gradient and a replay are those of the plain sum. Nothing here waits for the device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from nanproof._errors import UsageError
from nanproof.core.judge._parameters import is_dtensor

NamedTerms = tuple[tuple[str, float], ...]
"""Name and value of each term, on the host."""
_KEY = "nanproof.terms"
_NODES = 48
"""Nodes of the graph that are looked at before a loss counts as one without terms."""
_BESIDE = 8
"""Nodes that are looked at once some were found: of two sums in one loss, the other is near."""
_RISES = 3.0
"""How many times more than any other a term has to rise before it is named."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one loss, as they were before their weights."""

    names: tuple[str, ...]
    vector: Tensor
    """Their values, detached, on the device; fp32, or fp64 if a term is."""


class _Use:
    """Whether there are terms to look for at all: a run without them does not walk over graphs."""

    made = False


def weighted_sum(terms: Mapping[str, Tensor], weights: Mapping[str, float] | None = None) -> Tensor:
    """The sum of the terms of a loss, each times its weight, in fp32 at least. A guard then records the value of each term with
    every step, and an incident names the one that was not finite.

    Value and gradient are those of `w1 * t1 + w2 * t2 + ...`. Go on with the sum as with any loss: divide it, scale it, add to
    it. Nothing waits for the device. Inside `torch.compile`, or where no gradient is wanted, it is the sum and nothing more.

    Args:
        terms: one scalar tensor a name. Terms that need no gradient are fine; what is on another device is moved.
        weights: plain numbers; 1 for a name that is not in it. 0 leaves a term out of value and gradient: NaN times 0 would be
            NaN. It is still recorded. Parameters that only such a term reaches get no gradient, which
            DistributedDataParallel has to be told (`find_unused_parameters`).
    """
    factors = _checked(terms, weights)
    wide = torch.float64 if any(t.dtype == torch.float64 for t in terms.values()) else torch.float32
    device = next((t.device for t in terms.values() if t.device.type != "cpu"), torch.device("cpu"))
    values = [(t if t.dim() == 0 else t.reshape(())).to(device, wide, non_blocking=True) for t in terms.values()]
    total: Tensor | None = None
    for value, factor in zip(values, factors, strict=True):
        if factor:
            total = value * factor if total is None else total + value * factor
    if total is None:
        return torch.zeros((), dtype=wide, device=device)
    node: Any = None if torch.compiler.is_compiling() else total.grad_fn
    if node is not None:
        _Use.made = True
        node.metadata[_KEY] = Terms(tuple(terms), torch.stack([value.detach() for value in values]))
    return total


def terms_of(loss: Tensor) -> Terms | None:
    """The terms that a loss was made of by `weighted_sum`; None where there are none to be found. Of several sums in one loss,
    all: a term that is in more than one counts with its mean."""
    if not _Use.made or loss.grad_fn is None:
        return None
    found: list[Terms] = []
    queue: list[Any] = [loss.grad_fn]
    seen, most = set(queue), _NODES
    for node in queue:  # grows, nearest nodes first
        terms = node.metadata.get(_KEY)
        if terms is not None:
            found.append(terms)
            most = min(most, len(queue) + _BESIDE)
        elif len(queue) < most:
            later = [n for n, _ in node.next_functions if n is not None and n not in seen]
            seen.update(later)
            queue += later
    return mean_of(found)


def mean_of(found: Iterable[Terms | None]) -> Terms | None:
    """Of each term the mean over those who have it: a micro-batch need not have them all. On the device."""
    there = [terms for terms in found if terms is not None]
    if len(there) < 2:
        return there[0] if there else None
    device = there[0].vector.device
    vectors = [terms.vector.to(device, non_blocking=True) for terms in there]
    if all(terms.names == there[0].names for terms in there):
        return Terms(there[0].names, torch.stack(vectors).mean(0))
    values: dict[str, list[Tensor]] = {}
    for terms, vector in zip(there, vectors, strict=True):
        for name, value in zip(terms.names, vector.unbind(), strict=True):
            values.setdefault(name, []).append(value)
    return Terms(tuple(values), torch.stack([torch.stack(each).mean() for each in values.values()]))


def with_terms(packed: Tensor, *behind: Terms | None) -> Tensor:
    """A verdict with the terms of its loss behind it, and what else is to go with it: one copy takes all to the host."""
    vectors = [terms.vector.to(packed.device, packed.dtype, non_blocking=True) for terms in behind if terms is not None]
    return torch.cat((packed, *vectors)) if vectors else packed


def read(terms: Terms | None) -> NamedTerms:
    """Names and values. Waits for the device: for failures."""
    return () if terms is None else tuple(zip(terms.names, terms.vector.tolist(), strict=True))


def rose_most(before: Sequence[tuple[str, float]], now: Sequence[tuple[str, float]]) -> str:
    """Which term is the reason that the loss rose, in words; empty where that is not clear."""
    earlier = dict(before)
    rises = sorted(((_rise(earlier[name], value), name, value) for name, value in now if name in earlier), reverse=True)
    if not rises or not rises[0][0] < math.inf:
        return ""
    most, name, value = rises[0]
    others = rises[1][0] if len(rises) > 1 else 1.0
    return f"{name} rose most, {earlier[name]:.4g} to {value:.4g}" if most >= _RISES * others else ""


def _rise(before: float, now: float) -> float:
    """By which factor; 1 where it did not, infinity where there is none."""
    if not (math.isfinite(before) and math.isfinite(now)) or now <= before:
        return 1.0
    return now / before if before > 0 else math.inf


def _checked(terms: Any, weights: Any) -> list[float]:
    """The weight of each term; what is wrong with the call is said here."""
    where = "weighted_sum"
    if not isinstance(terms, Mapping) or not terms:
        what = "an empty one" if isinstance(terms, Mapping) else type(terms).__name__
        raise UsageError(
            f'{where}(terms): a mapping of names to scalar tensors is needed, not {what}: {{"text": text_loss, ...}}'
        )
    for name, term in terms.items():
        if not isinstance(name, str):
            raise UsageError(f"{where}(terms): the name {name!r} is no string; incidents and records call the term by it")
        if not isinstance(term, Tensor):
            raise UsageError(
                f"{where}: the term {name!r} is of type {type(term).__name__}; a tensor is needed: torch.tensor(...)"
            )
        if term.numel() != 1:
            raise UsageError(f"{where}: the term {name!r} has the shape {list(term.shape)}; take its mean or sum first")
        if term.is_complex() or term.dtype == torch.bool:
            raise UsageError(f"{where}: the term {name!r} is {term.dtype}; a real number is needed")
        if is_dtensor(term):
            raise UsageError(f"{where}: the term {name!r} is spread over ranks; call .full_tensor() on it first")
    weights = {} if weights is None else weights
    if not isinstance(weights, Mapping):
        raise UsageError(f"{where}(weights): a mapping of names to numbers is needed, not {type(weights).__name__}")
    unknown = [str(name) for name in weights if name not in terms]
    if unknown:
        raise UsageError(f"{where}(weights): there is no term {', '.join(unknown)}; the terms are {', '.join(terms)}")
    for name, weight in weights.items():
        if not isinstance(weight, Real) or not math.isfinite(weight):
            shown = "a tensor" if isinstance(weight, Tensor) else repr(weight)
            raise UsageError(f"{where}(weights): the weight of {name!r} is {shown}; a plain finite number is needed")
    return [float(weights.get(name, 1.0)) for name in terms]
