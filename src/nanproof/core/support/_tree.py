"""The tensors in a batch, whatever its shape: a tensor, or dictionaries, lists, tuples and dataclasses of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any

from torch import Tensor


def own_copy(batch: Any) -> Any:
    """A shallow copy of a list or a dictionary: a loss function that pops from its batch must find it whole the next time."""
    return copy.copy(batch) if isinstance(batch, (MutableMapping, MutableSequence)) else batch


_DEEPEST = 100
"""Levels of a batch that are looked at."""
_PLAIN = (int, float, str, bytes, type(None))


def tensors_in(value: Any, name: str = "batch", above: tuple[int, ...] = ()) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with the expression that reaches it: batch["labels"], batch[0]. Nested tensors, which have no shape, are left
    out. What contains itself is not entered again: `above` has the ids of what a value is in."""
    if isinstance(value, Tensor):
        if not value.is_nested:
            yield name, value
        return
    if _ends(value, above):
        return
    above = (*above, id(value))
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{name}[{key!r}]", above)
    elif isinstance(value, (list, tuple)):
        fields = getattr(value, "_fields", None)
        for i, item in enumerate(value):
            yield from tensors_in(item, f"{name}.{fields[i]}" if fields else f"{name}[{i}]", above)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), f"{name}.{field.name}", above)


def _ends(value: Any, above: tuple[int, ...]) -> bool:
    return isinstance(value, _PLAIN) or id(value) in above or len(above) > _DEEPEST


def positions(batch: Any) -> dict[int, int]:
    """Return the sample that a tensor belongs to, by its id, where samples are items of a list: a list of dictionaries, as in
    detection, or as many tensors as other tensors of the batch have rows."""
    rows = {t.shape[0] for _, t in tensors_in(batch) if t.dim()}
    found: dict[int, int] = {}

    def walk(value: Any) -> None:
        if isinstance(value, Mapping):
            for item in value.values():
                walk(item)
        elif isinstance(value, (list, tuple)):
            several = len(value) > 1 and not hasattr(value, "_fields")
            records = isinstance(value, list) and all(isinstance(item, Mapping) for item in value)
            tensors = all(isinstance(item, Tensor) and (not item.dim() or item.shape[0] != len(value)) for item in value)
            if several and (records or (tensors and len(value) in rows)):
                found.update({id(t): i for i, item in enumerate(value) for _, t in tensors_in(item)})
            else:
                for item in value:
                    walk(item)

    walk(batch)
    return found


def map_tensors(value: Any, change: Callable[[Tensor], Tensor], above: tuple[int, ...] = ()) -> Any:
    """The same structure with every tensor replaced by `change(tensor)`."""
    if isinstance(value, Tensor):
        return change(value)
    if _ends(value, above):
        return value
    above = (*above, id(value))
    if isinstance(value, Mapping):
        changed = {key: map_tensors(item, change, above) for key, item in value.items()}
        if type(value) is dict:
            return changed
        out: Any = copy.copy(value)
        for key, item in changed.items():
            out[key] = item
        return out
    if isinstance(value, (list, tuple)):
        items = [map_tensors(item, change, above) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        out = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                object.__setattr__(out, field.name, map_tensors(getattr(value, field.name), change, above))
        return out
    return value


def writes_to_batch(batch: Any) -> list[int]:
    """How often each tensor of a batch was written so far. A loss that writes into its batch cannot be run again on it."""
    return [tensor._version for _, tensor in tensors_in(batch) if not tensor.is_inference()]


def gradients_now(parameters: Iterable[Tensor]) -> list[tuple[int, int]]:
    """The gradients that are there: which, and how often they were written. What a callback writes into them after backward,
    running the step again would not."""
    return [(id(p.grad), p.grad._version) for p in parameters if p.grad is not None]
