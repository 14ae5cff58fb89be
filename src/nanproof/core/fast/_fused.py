"""torch's fused kernels, called with lists that are made once.

`optimizer.step()` collects parameters, gradients and state anew at every step, in Python, which is most of the host's time of a
fused step. `FusedStep` keeps the lists, compares them by identity, and makes the calls that `optimizer.step()` would make. If it
finds anything unknown (replaced state, a hook, a wrapped `step`, the profiler, an unusual setting), it returns False and the
optimizer takes the step itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Set
from itertools import chain, count, repeat
from operator import attrgetter, is_, itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import optimizer as torchs

from nanproof.core.judge._parameters import Present, is_dtensor, local, picked

_numbers = count()
_data_ptr, _local, _params = Tensor.data_ptr, attrgetter("_local_tensor"), itemgetter("params")
_TORCHS = str(Path(torchs.__file__).parent)


class _Lists:
    """The tensors of one parameter group that lie on one device and have one dtype."""

    def __init__(self, group: dict[str, Any], parameters: list[Tensor], places: list[int], state: Any, names: list[str]) -> None:
        self.group, self.parameters, self.names = group, parameters, names
        self.places = places
        """Positions of their gradients among those of the optimizer."""
        self.device = parameters[0].device
        self.sharded = is_dtensor(parameters[0])
        self._states = [state.get(p, {}) for p in parameters]
        self.kept: list[list[Any]] = [[found.get(name) for found in self._states] for name in names]
        """The state's entries: one list per name, in the order of the parameters."""

    @property
    def whole(self) -> bool:
        """Whether everything the kernel needs is there, and sharded alike."""
        spec = [_placed(p) for p in self.parameters]
        moments = [kept for name, kept in zip(self.names, self.kept, strict=True) if name != "step"]
        return all(isinstance(value, Tensor) for kept in self.kept for value in kept) and all(
            [_placed(value) for value in kept] == spec for kept in (*moments, [p.grad for p in self.parameters])
        )

    def local(self, tensors: list[Tensor]) -> list[Tensor]:
        """This rank's parts: through DTensor, a call takes twenty times as long."""
        return list(map(_local, tensors)) if self.sharded else tensors

    def is_current(self) -> bool:
        """Whether the state still holds the same tensors, and the settings still ask for them."""
        for name, kept in zip(self.names, self.kept, strict=True):
            if not all(map(is_, map(dict.get, self._states, repeat(name)), kept)):
                return False
        return self.names == _names(self.group)


def _placed(tensor: Any) -> Any:
    """How a tensor is sharded; None for a whole one."""
    return (tensor.device_mesh, tensor.placements) if is_dtensor(tensor) else None


class FusedStep:
    """The step of a fused Adam, AdamW or SGD over gradients of one pattern."""

    def __init__(
        self, optimizer: Optimizer, present: Present, gradients: list[Tensor], own_hooks: Set[int], captured: bool = False
    ) -> None:
        """`gradients`: those of this optimizer. `own_hooks`: ids of the hooks before its step that may be passed over.
        `captured`: its steps may be captured, so learning rates are tensors."""
        self.present, self._optimizer, self._own_hooks = present, optimizer, own_hooks
        self.outdated = False
        """Its lists are not those of the optimizer any more."""
        self._kernel = _sgd if type(optimizer) is SGD else _adam
        self._groups = list(optimizer.param_groups)
        self._sizes = self._sizes_now()
        self._states = list(optimizer.state.values())
        self._lists: list[_Lists] = []
        self._known = type(optimizer) in (Adam, AdamW, SGD) and self._collect(gradients)
        self._rates = [_Rate(lists.device) for lists in self._lists] if captured else None
        self.number = next(_numbers)

    def _collect(self, gradients: list[Tensor]) -> bool:
        """Make the lists. False where a gradient is not among those of the step, or where state has yet to be made."""
        place = {id(g): k for k, g in enumerate(gradients)}
        for group in self._groups:
            alike: dict[Any, list[Tensor]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    if id(p.grad) not in place or p.grad.dtype != p.dtype:
                        return False
                    alike.setdefault((local(p).device, p.dtype), []).append(p)
            for parameters in alike.values():
                places = [place[id(p.grad)] for p in parameters]
                self._lists.append(_Lists(group, parameters, places, self._optimizer.state, _names(group)))
        return all(lists.whole for lists in self._lists) and sum(len(lists.places) for lists in self._lists) == len(gradients)

    def ready(self) -> list[dict[str, Any]] | None:
        """The settings of each list, if the kernels can be called. None where `optimizer.step()` has to take the step."""
        if not (self._known and _is_plain(self._optimizer, self._own_hooks)):
            return None
        self.outdated = not self._is_current()
        if self.outdated:
            return None
        adamw = isinstance(self._optimizer, AdamW)
        settings = [found for lists in self._lists if (found := _settings(lists, adamw)) is not None]
        if len(settings) != len(self._lists):
            return None
        if self._rates is not None:
            for rate, found in zip(self._rates, settings, strict=True):
                rate.set(found)
        return settings

    def take(self, skip: Tensor, divisor: Tensor | None, gradients: list[Tensor]) -> bool:
        """Take the step, or none where `skip` is 1. False, with nothing done, where `optimizer.step()` has to."""
        settings = self.ready()
        if settings is None:
            return False
        if skip.device != _CPU:
            self.call(settings, skip, divisor, gradients)
        elif not skip:
            self.call(settings, skip, divisor, gradients, accepted=_ONE)
        self.taken()
        return True

    def call(
        self, settings: list[dict[str, Any]], skip: Tensor, divisor: Tensor | None, gradients: list[Tensor], accepted: Any = None
    ) -> None:
        """Call the kernels. Reads nothing on the host. `accepted`: 1 - skip, where that is at hand."""
        accepted = torch.rsub(skip, 1) if accepted is None else accepted
        with torch.no_grad():
            for lists, found in zip(self._lists, settings, strict=True):
                mine = gradients if len(self._lists) == 1 else picked(gradients, lists.places)
                self._kernel(lists, found, lists.local(mine), _flags(lists, skip, divisor), accepted)
                if lists.sharded:
                    torch.autograd.graph.increment_version(lists.parameters)

    def taken(self) -> None:
        """Tell a schedule, as the wrapper that it put around `step` does."""
        if "step" in vars(self._optimizer):
            self._optimizer._opt_called = True  # type: ignore[attr-defined]

    def addresses(self) -> list[int]:
        """Where its weights and its state lie."""
        return [address for lists in self._lists for address in map(_data_ptr, chain(lists.parameters, *lists.kept))]

    def _is_current(self) -> bool:
        groups, states = self._optimizer.param_groups, self._optimizer.state
        return (
            len(groups) == len(self._groups)
            and all(map(is_, groups, self._groups))
            and self._sizes_now() == self._sizes
            and len(states) == len(self._states)
            and all(map(is_, states.values(), self._states))
            and all(map(_Lists.is_current, self._lists))
        )

    def _sizes_now(self) -> list[int]:
        """How many parameters each group has: one that moves to the next group changes nothing else that is compared."""
        return list(map(len, map(_params, self._optimizer.param_groups)))


def _names(group: dict[str, Any]) -> list[str]:
    """Return the names of the state entries that the kernel needs."""
    if "betas" not in group:
        return ["momentum_buffer"] if group["momentum"] else []
    return ["step", "exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]


def _settings(lists: _Lists, adamw: bool) -> dict[str, Any] | None:
    """Return the settings of a group as the kernels take them; None where only `optimizer.step()` knows what they mean."""
    group = lists.group
    lr = group["lr"]
    if group.get("differentiable") or not group["fused"]:
        return None
    if isinstance(lr, Tensor) and (lr.requires_grad or "betas" not in group or lr.device not in (lists.device, _CPU)):
        return None
    found = {"lr": lr, "weight_decay": group["weight_decay"], "maximize": group["maximize"]}
    if "betas" in group:
        beta1, beta2 = group["betas"]
        found["decoupled"] = group.get("decoupled_weight_decay", adamw)
        found |= {"beta1": beta1, "beta2": beta2, "eps": group["eps"], "amsgrad": group["amsgrad"]}
    else:
        found |= {"momentum": group["momentum"], "dampening": group["dampening"], "nesterov": group["nesterov"]}
    return None if any(isinstance(value, Tensor) for name, value in found.items() if name != "lr") else found


_CPU = torch.device("cpu")
_ONE = torch.ones((), dtype=torch.float32, device=_CPU)


class _Rate:
    """A learning rate as a tensor that a captured graph reads. Setting it is a launch, only when it changes."""

    def __init__(self, device: torch.device) -> None:
        self._tensor = torch.zeros((), dtype=torch.float32, device=device)
        self._value: float | None = None

    def set(self, settings: dict[str, Any]) -> None:
        """Put the tensor in the place of the number."""
        if not isinstance(settings["lr"], Tensor):
            if settings["lr"] != self._value:
                self._value = settings["lr"]
                self._tensor.fill_(self._value)
            settings["lr"] = self._tensor


def _adam(lists: _Lists, settings: dict[str, Any], gradients: list[Tensor], flags: dict[str, Any], accepted: Tensor) -> None:
    settings = dict(settings)
    steps, *moments = lists.kept
    first, second, *largest = map(lists.local, moments)
    # Counting what is accepted gives what torch gives by counting every step and taking the skipped ones back.
    torch._foreach_add_(steps, [accepted.to(lists.device, non_blocking=True)] * len(steps))
    kernel: Callable[..., None] = torch._fused_adamw_ if settings.pop("decoupled") else torch._fused_adam_
    kernel(lists.local(lists.parameters), gradients, first, second, largest[0] if largest else [], steps, **settings, **flags)


def _sgd(lists: _Lists, settings: dict[str, Any], gradients: list[Tensor], flags: dict[str, Any], accepted: Tensor) -> None:
    kernel: Callable[..., None] = torch._fused_sgd_
    kernel(lists.parameters, gradients, lists.kept[0] if lists.kept else [], is_first_step=False, **settings, **flags)


def _flags(lists: _Lists, skip: Tensor, divisor: Tensor | None) -> dict[str, Tensor | None]:
    scale = None if divisor is None else divisor.to(lists.device, non_blocking=True)
    return {"grad_scale": scale, "found_inf": skip.to(lists.device, non_blocking=True)}


def _is_plain(optimizer: Any, own_hooks: Set[int]) -> bool:
    """Whether its `step()` would do nothing but call the kernels."""
    own = vars(optimizer).get("step")
    if own is not None and not (getattr(own, "_wrapped_by_lr_sched", False) and own.__wrapped__ is type(optimizer).step):
        return False
    return (
        not torchs._global_optimizer_pre_hooks
        and not torchs._global_optimizer_post_hooks
        and not optimizer._optimizer_step_post_hooks
        and optimizer._optimizer_step_pre_hooks.keys() <= own_hooks
        and _is_torchs(type(optimizer).step)
        and not torch._C._autograd._profiler_enabled()
    )


@functools.cache
def _is_torchs(step: Callable[..., Any] | None) -> bool:
    """Whether a method is torch's own, wrapped by nothing but torch."""
    while step is not None:
        code = getattr(step, "__code__", None)
        if code is None or not code.co_filename.startswith(_TORCHS):
            return False
        step = getattr(step, "__wrapped__", None)
    return True
