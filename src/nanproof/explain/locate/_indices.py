"""Lookups by index: find an id outside its table before it is used, and clamp such ids.

`IdCheck` finds the first lookup that cannot work, `ClampedIds` changes the ids that are outside and no others. On CUDA an id
outside its table ends the process's device context, so `IdCheck` can refuse the lookup instead of running it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nanproof.core.support._tree import tensors_in
from nanproof.explain.locate._calls import CallStack
from nanproof.explain.locate._locate import batch_shape, where_in_batch
from nanproof.explain.locate._trace import source_of_operation
from nanproof.explain.replay._interventions import Intervention
from nanproof.explain.replay._replay import Outcome, Replay

_TABLES = frozenset({"embedding", "embedding_bag", "embedding_renorm"})
_TARGETS = frozenset({"cross_entropy_loss", "nll_loss_nd", "nll_loss", "nll_loss2d"})
_ALONG = frozenset(
    {"gather", "index_select", "scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy", "index_fill"}
)
_ITEMS = frozenset({"__getitem__", "__setitem__"})
_NAMES = _TABLES | _TARGETS | _ALONG | _ITEMS | {"one_hot"}
_WRITTEN = {"cross_entropy_loss": "cross_entropy", "nll_loss_nd": "nll_loss", "__getitem__": "index", "__setitem__": "index_put"}
"""Functions that users know under another name."""


@dataclass(frozen=True, slots=True)
class Lookup:
    """Ids that an operation uses to read or write a table."""

    name: str
    ids: Tensor
    size: int
    """How many rows, or classes, there are."""
    place: tuple[str, Any]
    """Where the ids are among the arguments."""
    ignored: int | None = None
    """An id that is allowed to be outside."""
    wraps: bool = False
    """Whether negative ids count from the end."""

    @property
    def outside(self) -> Tensor:
        """Mark the ids that are outside of the table."""
        low = -self.size if self.wraps else 0
        bad = (self.ids < low) | (self.ids >= self.size)
        return bad if self.ignored is None else bad & (self.ids != self.ignored)

    @property
    def table(self) -> str:
        return f"{self.size} classes" if self.name in _TARGETS or self.name == "one_hot" else f"a table of {self.size} rows"

    @property
    def op(self) -> str:
        return _WRITTEN.get(self.name, self.name)


def lookups(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Lookup]:
    """Yield the lookups of one call; none where the ids are not plain integers."""

    def argument(place: int, key: str) -> tuple[Any, tuple[str, Any]]:
        return (args[place], ("args", place)) if len(args) > place else (kwargs.get(key), ("kwargs", key))

    if name in _ITEMS:
        yield from _items(name, args)
        return
    if name == "one_hot":
        (ids, where), size = argument(0, "input"), argument(1, "num_classes")[0]
        found = Lookup(name, ids, size, where) if isinstance(size, int) and size > 0 else None
    elif name in _ALONG:
        table, dim, (ids, where) = argument(0, "input")[0], argument(1, "dim")[0], argument(2, "index")
        usable = isinstance(table, Tensor) and isinstance(dim, int) and table.dim() > 0
        found = Lookup(name, ids, table.shape[dim], where) if usable else None
    elif name in _TABLES:
        table, (ids, where) = argument(0, "weight")[0], argument(1, "input")
        found = Lookup(name, ids, len(table), where) if isinstance(table, Tensor) else None
    else:
        logits, (ids, where), ignored = argument(0, "input")[0], argument(1, "target"), argument(4, "ignore_index")[0]
        usable = isinstance(logits, Tensor) and logits.dim() > 0
        size = logits.shape[min(1, logits.dim() - 1)] if usable else 0
        found = Lookup(name, ids, size, where, -100 if ignored is None else ignored) if usable else None
    if found is not None and _are_ids(found.ids):
        yield found


def _items(name: str, args: Sequence[Any]) -> Iterator[Lookup]:
    table, index = args[0], args[1]
    if not isinstance(table, Tensor):
        return
    parts = index if isinstance(index, tuple) else (index,)
    dim = 0
    for number, part in enumerate(parts):
        if part is None or isinstance(part, bool):
            continue
        if part is Ellipsis:
            later = [p for p in parts[number + 1 :] if p is not None]
            dim = table.dim() - sum(p.dim() if isinstance(p, Tensor) and p.dtype == torch.bool else 1 for p in later)
        elif isinstance(part, Tensor) and part.dtype == torch.bool:
            dim += part.dim()
        else:
            if _are_ids(part) and dim < table.dim():
                yield Lookup(name, part, table.shape[dim], ("item", number), wraps=True)
            dim += 1


def _are_ids(value: Any) -> bool:
    if not isinstance(value, Tensor) or not value.numel() or value.layout is not torch.strided:
        return False
    return not (value.is_floating_point() or value.is_complex() or value.dtype == torch.bool)


class OutOfRange(ValueError):
    """An id outside of its table, refused before it was used."""


@dataclass(frozen=True, slots=True)
class OutsideId:
    """The first lookup with an id outside of its table."""

    lookup: Lookup
    where: str
    """The module's path."""
    source: str


class IdCheck(Intervention):
    """Looks at the ids of every lookup. Notes the first that raises because of them; with `refuse`, raises before it runs."""

    names = _NAMES

    def __init__(self, stack: CallStack, refuse: bool) -> None:
        super().__init__()
        self._stack, self._refuse = stack, refuse
        self.found: OutsideId | None = None

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        found = next((one for one in lookups(name, args, kwargs) if bool(one.outside.any())), None)
        if found is None:
            return func(*args, **kwargs)
        call = self._stack.current
        outside = OutsideId(found, call.path if call is not None else "loss_fn", source_of_operation())
        if self._refuse:
            self.found = outside
            raise OutOfRange(f"{found.op} is given an id outside of {found.table}")
        try:
            return func(*args, **kwargs)
        except Exception:
            self.found = outside
            raise


class ClampedIds(Intervention):
    """Ids outside of their table become the nearest one inside; all others stay."""

    names = _NAMES

    def __init__(self) -> None:
        super().__init__()
        self.changed = 0

    def change(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = list(args), dict(kwargs)
        for found in list(lookups(name, args, kwargs)):
            outside = found.outside
            if not bool(outside.any()):
                continue
            self.acted += 1
            self.changed += int(outside.sum())
            inside = torch.where(outside, found.ids.clamp(0, found.size - 1), found.ids)
            kind, key = found.place
            if kind == "kwargs":
                kwargs[key] = inside
            elif kind == "args":
                args[key] = inside
            elif isinstance(args[1], tuple):
                args[1] = tuple(inside if i == key else part for i, part in enumerate(args[1]))
            else:
                args[1] = inside
        return func(*args, **kwargs)


def find_outside_id(replay: Replay, refuse: bool = False) -> tuple[OutsideId | None, Outcome]:
    """Run the step and return the first lookup that fails because of its ids."""
    stack = CallStack(replay.model)
    check = IdCheck(stack, refuse)
    outcome = replay.run(stack.following(), check)
    return check.found, outcome


@dataclass(frozen=True, slots=True)
class IdPlace:
    """Where in the batch an id is that is outside of its table."""

    name: str | None
    """The tensor, as an expression; None where the id is computed, as positions are."""
    first: tuple[int, ...]
    value: int
    samples: tuple[int, ...]
    tokens: tuple[int, ...]

    def __str__(self) -> str:
        return f"the index {self.value} at {list(self.first)}" + (f" of {self.name}" if self.name else "")


def place_in_batch(lookup: Lookup, batches: Sequence[Any]) -> IdPlace:
    """Find the ids in the batch: the same tensor, perhaps without its first or last token, or one with the same ids outside."""
    outside = lookup.outside
    first = _first(outside)
    value = int(lookup.ids[first])
    known = [(name, t, batch) for batch in batches for name, t in tensors_in(batch) if _are_ids(t) and t.dim()]
    same = [each for each in known if any(_equal(part, lookup.ids) for part in _parts(each[1]))]
    similar = [
        each for each in known if _equal(each[1][_again(lookup, each[1])].sort().values, lookup.ids[outside].sort().values)
    ]
    for name, t, batch in (*same, *similar)[:1]:
        bad = _again(lookup, t)
        samples, tokens = places(bad, batch) if len(batches) == 1 else ((), ())
        return IdPlace(name, _first(bad), int(t[_first(bad)]), samples, tokens)
    samples, tokens = places(outside, batches[0]) if len(batches) == 1 and outside.dim() else ((), ())
    return IdPlace(None, first, value, samples, tokens)


def _again(lookup: Lookup, t: Tensor) -> Tensor:
    """Mark the ids of another tensor that are outside of the same table."""
    return replace(lookup, ids=t).outside


def _parts(t: Tensor) -> Iterator[Tensor]:
    """A tensor as a loss may use it: whole, or moved by one token."""
    yield t
    if t.dim() > 1:
        yield from (t[:, 1:], t[:, :-1], t.transpose(0, 1))


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.numel() == b.numel() and torch.equal(a.flatten().to(b.device, torch.int64), b.flatten().to(torch.int64))


def places(bad: Tensor, batch: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the samples and tokens that are marked, as far as the shapes say; of one dimension that is the sequence, tokens."""
    samples, length = batch_shape(batch)
    bad = bad.reshape(bad.shape[1:]) if bad.dim() == 2 and bad.shape[0] == 1 != samples else bad
    if bad.dim() == 1 and len(bad) == length != samples:
        return (), tuple(torch.nonzero(bad).flatten().tolist())
    return where_in_batch(bad, samples, length) if samples > 1 and bad.dim() else ((), ())


def _first(marked: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.nonzero(marked)[0])
