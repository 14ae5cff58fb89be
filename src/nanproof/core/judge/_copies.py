"""Copies of what optimizers write, for steps that cannot be vetoed beforehand: copy, let it act, look, put back if it is bad.

`StateCopy` is such a copy: weights, state, settings and plain attributes, those of optimizers inside optimizers too.
`WeightKeeper` says when one is made: before the step of an optimizer that evaluates the loss itself or steps inside backward, and
of one whose arithmetic can make finite numbers non-finite. Where a copy would take too much memory, it only looks.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nanproof._errors import UnsupportedError
from nanproof._policy import Policy
from nanproof._text import size
from nanproof.core.judge._optimizers import BARE, holders_of, inside_of, members_of, name_of
from nanproof.core.judge._parameters import Parameters, clean_name, is_dtensor, local, unwrap
from nanproof.core.support._inner import fits, is_opaque, numbers, own_copy_of, plain, write
from nanproof.core.support._ranks import Ranks
from nanproof.core.support._tree import tensors_in

_HALF = (torch.float16, torch.bfloat16)
_MOST = 1 << 28
"""Bytes of weights that are copied without being asked."""
_SAFE = ("Adam AdamW SGD Adagrad RMSprop Adadelta Adamax NAdam RAdam ASGD Rprop Muon SparseAdam Adafactor").split()
_SAFE_KINDS = tuple(getattr(torch.optim, name) for name in _SAFE if hasattr(torch.optim, name))
"""Optimizers that make no finite number non-finite in fp32, while eps is above 0."""


def state_tensors(model: nn.Module, parameters: Parameters, optimizer: Any) -> Iterator[tuple[str, Tensor]]:
    """Weights and optimizer state, by name."""
    for name, parameter in unwrap(model).named_parameters():
        yield clean_name(name), parameter
    for name, p in zip(parameters.names, parameters.tensors, strict=True):
        for holder in holders_of(optimizer):
            for key, value in holder.state.get(p, {}).items():
                for where, tensor in tensors_in(value, str(key)):
                    yield f"optimizer state {where} of {name}", tensor


def attributes_of(holder: Any) -> dict[str, Any]:
    """What an optimizer keeps besides its state: numbers and tensors in attributes of its own, alone or in lists."""
    own = {k: v for k, v in getattr(holder, "__dict__", {}).items() if k not in BARE and not k.startswith(("_nanproof", "__"))}
    return {k: v for k, v in own.items() if _plain_value(v) and k not in _TRANSIENT}


_TRANSIENT = ("found_inf", "grad_scale", "_opt_called", "_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")
"""What torch's own code sets on an optimizer: no state."""


def _plain_value(value: Any, depth: int = 0) -> bool:
    if isinstance(value, (list, tuple)) and depth < 2:
        return all(_plain_value(item, depth + 1) for item in value)
    if isinstance(value, dict) and depth < 2:
        return all(isinstance(k, (str, int)) and _plain_value(item, depth + 1) for k, item in value.items())
    if isinstance(value, nn.Parameter):
        return False
    return isinstance(value, (bool, int, float, str, Tensor))


def set_attributes(holder: Any, kept: dict[str, Any]) -> None:
    for name, value in kept.items():
        place = holder.__dict__.get(name)
        if fits(place, value):
            write(place, value)
        else:
            holder.__dict__[name] = own_copy_of(value)


class StateCopy:
    """Weights, state and settings of optimizers as they were at a moment."""

    def __init__(self, parameters: Sequence[Tensor], optimizer: Any) -> None:
        self._weights = [(p, own_copy_of(p)) for p in parameters]
        self._holders = []
        for holder in holders_of(optimizer):
            states = {p: {k: own_copy_of(v) for k, v in s.items()} for p, s in holder.state.items() if isinstance(s, dict)}
            more = {k: copy.deepcopy(v) for k, v in holder.state.items() if not isinstance(v, dict)}
            groups = [(g, {k: own_copy_of(v) for k, v in g.items() if k != "params"}) for g in holder.param_groups]
            attributes = {k: copy.deepcopy(v) for k, v in attributes_of(holder).items()}
            self._holders.append((holder, states, more, groups, attributes))

    def put(self) -> None:
        """Put everything back; the host knows that it must be. State that came since goes."""
        for p, weight in self._weights:
            write(p, weight) if not is_opaque(p) else p.detach().copy_(weight)
        for holder, states, more, groups, attributes in self._holders:
            for key in [key for key in holder.state if key not in states and key not in more]:
                del holder.state[key]
            for p, kept in states.items():
                refill(holder.state[p], kept)
            for key, value in more.items():
                holder.state[key] = value
            for group, kept in groups:
                refill(group, kept, but="params")
            set_attributes(holder, attributes)

    def put_where(self, broken: Tensor) -> None:
        """Put weights and state back on the device where `broken` says so. State that came since becomes zeros."""
        with torch.no_grad():
            for p, weight in self._weights:
                _where(broken, weight, p)
            for holder, states, _, _, _ in self._holders:
                for p, _ in self._weights:
                    for key, value in holder.state.get(p, {}).items():
                        if isinstance(value, Tensor):
                            kept = states.get(p, {}).get(key)
                            _where(broken, torch.zeros_like(value) if kept is None else kept, value)


def refill(live: dict[Any, Any], kept: dict[Any, Any], but: str = "") -> None:
    """Make a dictionary what it was; tensors in place."""
    for key in [key for key in live if key not in kept and key != but]:
        del live[key]
    for key, value in kept.items():
        place: Any = live.get(key)
        if fits(place, value):
            write(place, value)
        else:
            live[key] = own_copy_of(value)


def can_break(optimizer: Any) -> bool:
    """Whether an optimizer's arithmetic may make a finite number non-finite: any but torch's own, and those with an eps of 0.
    One that is made of others is what they are."""
    inside = inside_of(optimizer)
    if inside:
        return any(can_break(inner) for inner in inside if not inside_of(inner))
    return type(optimizer) not in _SAFE_KINDS or _divides_by_zero(optimizer)


def _divides_by_zero(optimizer: Any) -> bool:
    return any(isinstance(eps := group.get("eps"), float) and eps < 1e-38 for group in optimizer.param_groups)


class WeightKeeper:
    """Looks at weights and state after a step; with `restore`, undoes one that broke any of them: on all weights, the others of
    the step included."""

    def __init__(self, parameters: Parameters, optimizer: Any, looked: list[Tensor], restore: bool, ranks: Ranks) -> None:
        self.restore = restore
        self._looked = looked
        self._all = [p for p in parameters.tensors if p.requires_grad]
        self._optimizer = optimizer
        self._agree = ranks.any_rank if any(is_dtensor(p) for p in self._all) else None
        self._copy: StateCopy | None = None

    @classmethod
    def of(
        cls, parameters: Parameters, optimizer: Any, on_device: bool, must: bool, policy: Policy, ranks: Ranks
    ) -> WeightKeeper | None:
        """None where no step can break a weight, or the policy does not want to know. `must`: a step cannot be vetoed."""
        trainable = [p for p in parameters.tensors if p.requires_grad]
        weighs = sum(p.nbytes for p in trainable)
        if must and (policy.copy is False or (policy.copy == "auto" and weighs > _MOST)):
            raise UnsupportedError(
                f"{name_of(optimizer)} moves weights before a step can be judged: guarding it takes a copy of weights and state, "
                f"at least {size(weighs)}; allow it with Policy(copy=True)"
            )
        half = [p for p in trainable if p.dtype in _HALF] if policy.half_weights != "off" else []
        restore = policy.half_weights == "restore" or (
            policy.half_weights == "auto" and (not on_device or any(p.dtype == torch.float16 for p in half))
        )
        broken_by = [member for member in members_of(optimizer) if can_break(member)]
        risky = {id(p) for member in broken_by for holder in (member, *inside_of(member)) for p in _parameters_of(holder)}
        looked = {id(p): p for p in (*half, *(p for p in trainable if id(p) in risky))}
        certain = any(_divides_by_zero(holder) for holder in holders_of(optimizer))
        copies = policy.copy is True or must or (policy.copy == "auto" and certain and weighs <= _MOST)
        if must or policy.copy is True:
            looked = {id(p): p for p in trainable}
        if not looked:
            return None
        return cls(parameters, optimizer, list(looked.values()), (bool(half) and restore) or copies, ranks)

    @property
    def bytes(self) -> int:
        """What a copy takes now."""
        return sum(part.nbytes for tensor in self._tensors(self._all) for _, part in plain(tensor))

    def save(self) -> None:
        """Before the optimizer acts; once a step."""
        if self.restore and self._copy is None:
            self._copy = StateCopy(self._all, self._optimizer)

    def forget(self) -> None:
        self._copy = None

    def broken(self) -> Tensor:
        """Bool on the device: some weight or state that is looked at is non-finite now. Of sharded weights each rank has a part,
        so the ranks agree: one small collective."""
        device = local(self._looked[0]).device
        parts = [part for tensor in self._tensors(self._looked) for part in numbers(tensor) if part.dim()]
        bad = torch.zeros((), dtype=torch.bool, device=device)
        for place, group in _by_place(parts):
            ends = _ends(group) if place.type == "cpu" else torch._foreach_norm(group, torch.inf)
            bad = bad | ~torch.isfinite(torch.stack(ends)).all().to(device, non_blocking=True)
        return bad if self._agree is None else self._agree(bad)

    def put_back(self, broken: Tensor) -> None:
        """Undo the step where `broken` says so, on the device. The copy stays: another optimizer may act on the same step."""
        if self._copy is not None:
            self._copy.put_where(broken)

    def put_back_now(self) -> None:
        """Undo the step; the host already knows that it must be."""
        if self._copy is not None:
            self._copy.put()
        self._copy = None

    def _tensors(self, parameters: list[Tensor]) -> Iterator[Tensor]:
        for p in parameters:
            yield p
            for holder in holders_of(self._optimizer):
                for value in holder.state.get(p, {}).values():
                    yield from (tensor for _, tensor in tensors_in(value))


def _parameters_of(holder: Any) -> Iterator[Tensor]:
    return (p for group in holder.param_groups for p in group["params"])


def _where(condition: Tensor, old: Tensor, live: Tensor) -> None:
    if is_opaque(live):
        return
    for (_, now), (_, then) in zip(plain(live), plain(old), strict=True):
        now.copy_(torch.where(condition.to(now.device, non_blocking=True), then, now))


def _by_place(parts: list[Tensor]) -> Iterator[tuple[torch.device, list[Tensor]]]:
    groups: dict[Any, list[Tensor]] = {}
    for part in parts:
        groups.setdefault((part.device, part.dtype), []).append(part)
    return ((place, group) for (place, _), group in groups.items())


def _ends(group: list[Tensor]) -> list[Tensor]:
    """Smallest and largest number of each tensor on CPU, where a norm takes many times as long. Sums take half as long again: if
    they are finite, so is everything, and they are returned instead."""
    sums = [part.sum(dtype=torch.promote_types(part.dtype, torch.float32)) for part in group]
    return sums if torch.isfinite(torch.stack(sums)).all() else [end for part in group for end in torch.aminmax(part)]
