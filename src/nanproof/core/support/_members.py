"""The optimizers that one step is made of, with what they keep: several side by side, and those inside others.

A list of optimizers is one step to the guard, and containers (torchtitan's), Lookahead and SAM hold others. Whoever reads
settings or moments has to look at all of them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from operator import is_, methodcaller
from typing import Any

from torch import Tensor

from nanproof.core.judge._optimizers import inside_of, is_optimizer, members_of
from nanproof.core.judge._optimizers import name_of as all_of_them

_values = methodcaller("values")
_MUST_BE_FINITE = ("lr", "weight_decay", "betas", "momentum", "dampening", "eps", "alpha", "lr_decay", "rho", "lambd")
"""Settings that make every weight of their group non-finite if they are. Others may be infinite on purpose."""


def optimizers_in(optimizer: Any) -> list[Any]:
    """Return every optimizer that a step reaches, outermost first, each once. A list given by the
    user counts as its members; the guard's own bundle of several is not among them."""
    members = optimizer if isinstance(optimizer, (list, tuple)) else members_of(optimizer)
    found = (each for member in members for each in (member, *inside_of(member)) if is_optimizer(each))
    return list({id(each): each for each in found}.values())


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
    return all_of_them(optimizer)


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


class Settings:
    """The settings of parameter groups, looked at in every step. They are looked at again only if one of them was set."""

    def __init__(self) -> None:
        self._seen: list[Any] = []
        self._bad = False
        self._tensors: list[Tensor] = []

    def look(self, optimizer: Any) -> tuple[bool, list[Tensor]]:
        """Whether a setting is non-finite, as far as the host knows, and those that are tensors, which only the device can look
        at."""
        now = list(chain.from_iterable(map(_values, optimizer.param_groups)))
        if len(now) != len(self._seen) or not all(map(is_, now, self._seen)):
            values = [group.get(key) for group in optimizer.param_groups for key in _MUST_BE_FINITE]
            self._seen = [] if any(isinstance(value, list) for value in values) else now  # a list can change unseen
            numbers = chain.from_iterable(value if isinstance(value, (tuple, list)) else (value,) for value in values)
            self._bad = any(isinstance(number, float) and not math.isfinite(number) for number in numbers)
            self._tensors = [value for value in values if isinstance(value, Tensor)]
        return self._bad, self._tensors
