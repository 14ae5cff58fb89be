"""The optimizer's step on copies of weights, gradients and state: what would it do, and what with another setting?

An optimizer is copied as it is, not built again: one whose constructor wants more than its groups hold, or that contains other
optimizers, can be tried as well. Nothing of the run is touched. Where a copy is not possible, the answer is None.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanproof.core.judge._optimizers import is_optimizer, members_of

LARGEST = 1 << 26
"""Elements of the weights that are copied for one look at the optimizer's step, at the most."""
HALVES = (torch.float16, torch.bfloat16)
_LEFT_BEHIND = ("found_inf", "grad_scale")
_PLAIN: tuple[type, ...] = (
    *(int, float, complex, str, bytes, bool, type(None), torch.dtype, torch.device, type),
    *(types.FunctionType, types.BuiltinFunctionType, types.ModuleType),
)
"""What two optimizers may share."""


@dataclass(frozen=True, slots=True)
class Copied:
    """A parameter that took a step on a copy."""

    parameter: Tensor
    """The one of the run."""
    before: Tensor
    after: Tensor
    state: dict[str, Tensor]
    """What the optimizer keeps of it after the step."""

    @property
    def bad(self) -> list[str]:
        """Keys of the state that are non-finite after the step."""
        return [key for key, value in self.state.items() if value.is_floating_point() and not bool(torch.isfinite(value).all())]

    @property
    def finite(self) -> bool:
        """Weight and state are finite."""
        return bool(torch.isfinite(self.after).all()) and not self.bad


def step_on_copies(
    optimizer: Any,
    gradients: Mapping[Tensor, Tensor],
    *changes: AbstractContextManager[Any],
    dtype: torch.dtype | None = None,
    wide_state: bool = False,
    fresh: bool = False,
    settings: Mapping[str, Any] | None = None,
    by_group: Mapping[int, Mapping[str, Any]] | None = None,
) -> list[Copied] | None:
    """Take one step on copies of the parameters that have a gradient. None where that cannot be tried.

    Args:
        changes: contexts that are open around the step.
        dtype: the weights, and state of their dtype, in another one.
        wide_state: half-precision state in fp32.
        fresh: without the state there is.
        settings: other values for settings that the groups have.
        by_group: the same for single groups, by their id.
    """
    held = {id(p): p for each in members_of(optimizer) for group in each.param_groups for p in group["params"]}
    chosen, size = {}, 0
    for p in held.values():
        if p in gradients and size <= LARGEST:
            chosen[id(p)] = p
            size += p.numel()
    if not chosen:
        return None
    try:
        maker = _Twins(chosen, gradients, dtype, wide_state, fresh, settings or {}, by_group or {})
        twins = [maker.optimizer(each) for each in members_of(optimizer)]
        before = {key: clone.detach().clone() for key, clone in maker.clones.items()}
        with ExitStack() as stack:
            for change in changes:
                stack.enter_context(change)
            for twin in twins:
                twin.step()
    except Exception:
        return None
    return [Copied(p, before[key], maker.clones[key].detach(), maker.state(maker.clones[key])) for key, p in chosen.items()]


class _Twins:
    """Copies optimizers, with all that they are made of."""

    def __init__(
        self,
        chosen: Mapping[int, Tensor],
        gradients: Mapping[Tensor, Tensor],
        dtype: torch.dtype | None,
        wide_state: bool,
        fresh: bool,
        settings: Mapping[str, Any],
        by_group: Mapping[int, Mapping[str, Any]],
    ) -> None:
        self._wide_state, self._fresh, self._settings, self._by_group = wide_state, fresh, settings, by_group
        self._made: dict[int, Any] = {}
        """By id of the original: what two places share, they share again."""
        self._kept: list[Any] = []
        """An id is unique only while its object lives."""
        self._optimizers: list[Any] = []
        self.clones: dict[int, Tensor] = {}
        for key, p in chosen.items():
            clone = p.detach().clone().to(dtype or p.dtype).requires_grad_()
            clone.grad = gradients[p].detach().to(clone.dtype, copy=True)
            self.clones[key] = self._made[key] = clone

    def state(self, clone: Tensor) -> dict[str, Tensor]:
        """What all optimizers keep of a copy."""
        found: dict[str, Any] = {}
        for each in self._optimizers:
            if clone in each.state:
                found |= each.state[clone]
        return {key: value for key, value in found.items() if isinstance(value, Tensor)}

    def optimizer(self, original: Any) -> Any:
        """The same optimizer over the copies. What was put over its methods since (by schedulers and trainers), and its hooks,
        stay behind."""
        if id(original) in self._made:
            return self._made[id(original)]
        twin = object.__new__(type(original))
        self._remember(original, twin)
        self._optimizers.append(twin)
        for name, value in vars(original).items():
            if name in _LEFT_BEHIND or (callable(value) and hasattr(type(original), name)):
                continue
            if name.startswith("_optimizer_") and name.endswith("_hooks"):
                vars(twin)[name] = type(value)()
            elif name == "state":
                vars(twin)[name] = self._states(value)
            elif name == "param_groups":
                vars(twin)[name] = self._all_groups(value)
            else:
                vars(twin)[name] = self._value(value)
        return twin

    def _remember(self, original: Any, twin: Any) -> None:
        self._made[id(original)] = twin
        self._kept.append(original)

    def _all_groups(self, groups: Any) -> Any:
        if id(groups) not in self._made:
            self._remember(groups, [self._group(group) for group in groups])
        return self._made[id(groups)]

    def _group(self, group: dict[str, Any]) -> dict[str, Any]:
        if id(group) not in self._made:
            twin = {key: self._value(value) for key, value in group.items() if key != "params"}
            other = {**self._settings, **self._by_group.get(id(group), {})}
            twin |= {key: value for key, value in other.items() if key in twin}
            twin["params"] = [self.clones[id(p)] for p in group["params"] if id(p) in self.clones]
            self._remember(group, twin)
        found: dict[str, Any] = self._made[id(group)]
        return found

    def _states(self, states: Any) -> Any:
        twin = copy.copy(states)
        twin.clear()
        for key, kept in () if self._fresh else states.items():
            if not isinstance(key, Tensor):
                twin[key] = self._value(kept)
            elif id(key) in self.clones:
                twin[self.clones[id(key)]] = {name: self._moment(value, key) for name, value in kept.items()}
        return twin

    def _moment(self, value: Any, p: Tensor) -> Any:
        if not isinstance(value, Tensor) or id(value) in self._made:
            return self._value(value)
        same = value.is_floating_point() and value.dtype == p.dtype and value.dim() > 0
        dtype = self.clones[id(p)].dtype if same else value.dtype
        if self._wide_state and dtype in HALVES and value.dim():
            dtype = torch.float32
        twin = value.detach().clone().to(dtype)
        self._remember(value, twin)
        return twin

    def _value(self, value: Any) -> Any:
        if id(value) in self._made:
            return self._made[id(value)]
        if isinstance(value, _PLAIN):
            return value
        if isinstance(value, Tensor):
            twin: Any = value.detach().clone()
        elif isinstance(value, types.MethodType):
            return types.MethodType(value.__func__, self._value(value.__self__))
        elif is_optimizer(value):
            return self.optimizer(value)
        elif type(value) is dict:
            twin = {}
            self._remember(value, twin)
            twin.update({self._value(k) if isinstance(k, Tensor) else k: self._value(v) for k, v in value.items()})
        elif type(value) in (list, tuple, set):
            twin = type(value)(self._value(v) for v in value)
        elif isinstance(value, nn.Module) and sum(p.numel() for p in value.parameters()) > LARGEST:
            raise ValueError("a model that is too large to copy hangs on the optimizer")
        else:
            twin = copy.deepcopy(value, self._made)
        self._remember(value, twin)
        return twin


def all_finite(copied: Sequence[Copied] | None) -> bool:
    """Every weight and every state is finite after the step; False where it could not be tried."""
    return copied is not None and all(each.finite for each in copied)


def changed_share(copied: Sequence[Copied] | None) -> float:
    """Share of the elements that a step changed."""
    if not copied:
        return 0.0
    changed = sum(int((each.before != each.after).sum()) for each in copied)
    return changed / max(1, sum(each.before.numel() for each in copied))
