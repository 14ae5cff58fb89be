"""The tensors in a batch, whatever its shape: a tensor, or dictionaries, lists, tuples and dataclasses of them."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import Any

from torch import Tensor

log = logging.getLogger("nanproof")


def own_copy(batch: Any) -> Any:
    """A shallow copy of a list or a dictionary: a loss function that pops from its batch must find it whole the next time."""
    return copy.copy(batch) if isinstance(batch, (MutableMapping, MutableSequence)) else batch


_PLAIN = (int, float, str, bytes, type(None))
_gradient_of, _version_of = attrgetter("grad"), attrgetter("_version")
_DEEPEST = 100
"""Levels of a batch that are looked at."""


def tensors_in(value: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Every tensor with the expression that reaches it: batch["labels"], batch[0]. Nested tensors, which have no shape, are left
    out."""
    found = [(name, value)] if isinstance(value, Tensor) else _walk(value, name, {})
    return ((path, item) for path, item in found if isinstance(item, Tensor) and not item.is_nested)


def all_tensors(value: Any) -> list[Tensor]:
    """The tensors of `tensors_in`, perhaps one of them more often. Most batches are nearly flat, and need neither names nor a
    walk."""
    found: list[Tensor] = []
    if isinstance(value, Tensor):
        found.append(value)
    else:
        _collect(value, found, 2)
    return [t for t in found if not t.is_nested]


def _collect(value: Any, found: list[Tensor], depth: int) -> None:
    kind = type(value)
    if kind is tuple or kind is list:
        items = value
    elif isinstance(value, dict) and kind.values is dict.values:
        items = list(value.values())
    else:
        items = ()
        found += [t for _, t in tensors_in(value)]
    for item in items:
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, _PLAIN):
            continue
        elif depth:
            _collect(item, found, depth - 1)
        else:
            found += [t for _, t in tensors_in(item)]


def _walk(value: Any, name: str, seen: dict[int, Any], depth: int = 0) -> Iterator[tuple[str, Any]]:
    """All that is in a batch, each list or dictionary before what it holds. One that is met again, perhaps in itself, is passed
    over. `seen` has the objects too: one that is made as it is asked for would leave its id to the next."""
    if id(value) in seen or depth > _DEEPEST:
        return
    seen[id(value)] = value
    yield name, value
    for key, item in _items(value):
        if isinstance(item, _PLAIN):
            continue
        path = f"{name}.{key}" if isinstance(key, _Field) else f"{name}[{key!r}]"
        if isinstance(item, Tensor):
            yield path, item
        else:
            yield from _walk(item, path, seen, depth + 1)


class _Field(str):
    """The name of an attribute."""


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """What a list, dictionary or dataclass holds, with its keys; nothing if it does not let itself be read."""
    try:
        if isinstance(value, (list, tuple)):
            fields = getattr(value, "_fields", None)
            return list(zip(map(_Field, fields), value, strict=True) if fields else enumerate(value))
        if isinstance(value, (dict, Mapping)):
            return list(value.items())
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [_Field(field.name) for field in dataclasses.fields(value) if hasattr(value, field.name)]
            return [(name, getattr(value, name)) for name in names]
    except Exception:
        log.debug("nanproof: a %s in a batch cannot be read", type(value).__name__, exc_info=True)
    return []


def positions(batch: Any) -> dict[int, int]:
    """Return the sample that a tensor belongs to, by its id, where samples are items of a list: a list of dictionaries, as in
    detection, or as many tensors as other tensors of the batch have rows."""
    rows = {t.shape[0] for _, t in tensors_in(batch) if t.dim()}
    found: dict[int, int] = {}
    for _, value in _walk(batch, "", {}):
        if not isinstance(value, (list, tuple)) or len(value) < 2 or hasattr(value, "_fields"):
            continue
        records = isinstance(value, list) and all(isinstance(item, Mapping) for item in value)
        tensors = all(isinstance(item, Tensor) and (not item.dim() or item.shape[0] != len(value)) for item in value)
        if records or (tensors and len(value) in rows):
            for i, item in enumerate(value):
                for _, t in tensors_in(item):
                    found.setdefault(id(t), i)  # the outer list is that of the samples
    return found


def map_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure with every tensor replaced by `change(tensor)`."""
    return _mapped(value, change, {}, 0)


def _mapped(value: Any, change: Callable[[Tensor], Tensor], made: dict[int, tuple[Any, Any]], depth: int) -> Any:
    """`made`: by id, what was met before and what it became. What contains itself stays as it is in there."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, _PLAIN) or depth > _DEEPEST:
        return value
    if id(value) not in made:
        made[id(value)] = value, value
        items = {key: _mapped(item, change, made, depth + 1) for key, item in _items(value)}
        made[id(value)] = value, _refilled(value, items)
    return made[id(value)][1]


def _refilled(value: Any, items: dict[Any, Any]) -> Any:
    """A list, dictionary or dataclass like this one, with other items. One that cannot be made anew stays as it is."""
    if type(value) is dict:
        return items
    if type(value) in (list, tuple):
        return type(value)(items.values())
    try:
        if not items:
            return value
        if isinstance(value, (list, tuple)):
            return type(value)(*items.values()) if hasattr(value, "_fields") else type(value)(list(items.values()))
        out = copy.copy(value)
        for key, item in items.items():
            if isinstance(value, Mapping):
                out[key] = item
            else:
                object.__setattr__(out, str(key), item)
    except Exception:
        log.debug("nanproof: a %s in a batch cannot be copied", type(value).__name__, exc_info=True)
        return value
    return out


def writes_to_batch(batch: Any) -> list[int]:
    """How often each tensor of a batch was written so far. A loss that writes into its batch cannot be run again on it."""
    return [tensor._version for tensor in all_tensors(batch) if not tensor.is_inference()]


def gradients_now(parameters: Iterable[Tensor]) -> list[tuple[int, int]]:
    """The gradients that are there: which, and how often they were written. What a callback writes into them after backward,
    running the step again would not."""
    gradients = list(map(_gradient_of, parameters))
    there = list(compress(gradients, map(is_not, gradients, repeat(None))))
    return list(zip(map(id, there), map(_version_of, there), strict=True))
