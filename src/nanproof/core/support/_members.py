"""The optimizers that one step is made of: several side by side, and those that others contain.

A list of optimizers is one step to the guard. Containers (torchtitan's), Lookahead and SAM hold
others inside, under attributes that have become customary. Whoever reads settings or moments has to
look at all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from nanproof.core.judge._optimizers import members_of

_LISTS = ("optimizers", "chained_optimizers")
_ONE = ("optimizer", "base_optimizer", "_optimizer", "optim")
"""Attributes under which optimizers keep the ones they contain."""
_MUST_BE_FINITE = ("lr", "weight_decay", "betas", "momentum", "eps")


def is_optimizer(value: Any) -> bool:
    """Whether this takes steps over parameter groups."""
    return not isinstance(value, type) and all(hasattr(value, name) for name in ("param_groups", "state", "step", "zero_grad"))


def optimizers_in(optimizer: Any) -> list[Any]:
    """Return every optimizer that a step reaches, outermost first, each once. A list given by the
    user counts as its members; the guard's own bundle of several is not among them."""
    found: list[Any] = []
    waiting = [*optimizer] if isinstance(optimizer, (list, tuple)) else [*members_of(optimizer)]
    while waiting:
        each = waiting.pop(0)
        if each is None or any(each is other for other in found):
            continue
        found.append(each)
        inside = [x for name in _LISTS for x in _listed(getattr(each, name, None))]
        inside += [getattr(each, name, None) for name in _ONE]
        waiting += [x for x in inside if is_optimizer(x)]
    return found


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else []


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return every parameter group that a step reads, each once."""
    groups = (group for each in optimizers_in(optimizer) for group in each.param_groups)
    return list({id(group): group for group in groups}.values())


def states_of(optimizer: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each parameter, or other key, with what an optimizer keeps of it."""
    for each in optimizers_in(optimizer):
        yield from each.state.items()


def state_of(optimizer: Any, parameter: Tensor) -> dict[str, Any]:
    """Return what is kept of a parameter, by all optimizers that hold it."""
    found: dict[str, Any] = {}
    for each in optimizers_in(optimizer):
        found |= each.state.get(parameter, {})
    return found


def owner_of(optimizer: Any, parameter: Tensor) -> Any:
    """Return the innermost optimizer that holds a parameter; None where none does."""
    holders = [each for each in optimizers_in(optimizer) if any(parameter is p for g in each.param_groups for p in g["params"])]
    return holders[-1] if holders else None


def name_of(optimizer: Any, parameter: Tensor | None = None) -> str:
    """Return the class of the optimizer that steps this parameter; without one, of all of them."""
    owner = None if parameter is None else owner_of(optimizer, parameter)
    if owner is not None:
        return type(owner).__name__
    return ", ".join(dict.fromkeys(type(each).__name__ for each in members_of(optimizer)))


@dataclass(frozen=True, slots=True)
class BadSetting:
    """A setting of a parameter group that is NaN or Inf."""

    place: str
    """As one writes it: param_groups[0]["lr"]."""
    key: str
    value: float
    group: dict[str, Any]
    index: int | None
    """The group's place in the optimizer's own `param_groups`; None for one of an optimizer inside."""
    owner: Any

    def __str__(self) -> str:
        return f"{self.place} is {self.value:g}"


def bad_settings(optimizer: Any) -> list[BadSetting]:
    """Return the settings that make any step non-finite. Reads tensors, so it waits: for failures."""
    found = []
    top = [(group, each) for each in members_of(optimizer) for group in each.param_groups]
    placed = [(group, each, i, f"param_groups[{i}]") for i, (group, each) in enumerate(top)]
    seen = {id(group) for group, *_ in placed}
    for each in optimizers_in(optimizer):
        inner = [(i, group) for i, group in enumerate(each.param_groups) if id(group) not in seen]
        placed += [(group, each, None, f"{type(each).__name__}.param_groups[{i}]") for i, group in inner]  # type: ignore[misc]
        seen |= {id(group) for _, group in inner}
    for group, each, index, place in placed:
        for key in _MUST_BE_FINITE:
            value = _first_bad(group.get(key))
            if value is not None:
                found.append(BadSetting(f'{place}["{key}"]', key, value, group, index, each))
    return found


def _first_bad(setting: Any) -> float | None:
    numbers = setting if isinstance(setting, (tuple, list)) else (setting,)
    values = (float(x) for x in numbers if isinstance(x, (float, int, Tensor)))
    return next((x for x in values if not math.isfinite(x)), None)
