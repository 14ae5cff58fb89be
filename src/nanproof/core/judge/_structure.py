"""Structure: what a model and its optimizers are made of, by identity. Compared at every step, so that nothing that was added or
replaced is trained unseen.

The tensors are held, not their addresses: an address may come back with another tensor behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any

from torch import Tensor, nn

from nanproof._wording import listed
from nanproof.core.judge._optimizers import holders_of
from nanproof.core.judge._parameters import Parameters, clean_name, is_dtensor, is_plain, unwrap

_values = methodcaller("values")
_kind = attrgetter("dtype", "device", "shape")
_trains = attrgetter("requires_grad")
_place = methodcaller("data_ptr")


class Structure:
    """Modules, parameters and groups as they are now."""

    def __init__(self, model: nn.Module, optimizer: Any, parameters: Parameters) -> None:
        self.modules = list(model.modules())
        self._optimizer = optimizer
        self._holders = holders_of(optimizer)
        # Modules under fully_shard hold other tensors during forward and backward.
        sharded = any(is_dtensor(p) for p in parameters.tensors)
        dicts = [d for m in self.modules for d in ((m._modules,) if sharded else (m._modules, m._parameters))]
        self._filled, self._empty = [d for d in dicts if d], [d for d in dicts if not d]
        self._inside = list(chain.from_iterable(map(_values, self._filled)))
        self._buffers = [m._buffers for m in self.modules]
        self._counts = list(map(len, self._buffers))
        self._members = _members(self._holders)
        self._tensors = parameters.tensors
        self._trains = list(map(_trains, self._tensors))
        self._kinds = list(map(_kind, self._tensors))
        self._plain = all(map(is_plain, self._tensors))
        self._places = list(map(_place, self._tensors)) if self._plain else []
        inner = unwrap(model)
        self._named = {clean_name(name): p for name, p in inner.named_parameters()}
        self._named_modules = {clean_name(name): m for name, m in inner.named_modules()}
        self._shapes = {name: p.shape for name, p in self._named.items()}
        self._all_buffers = {clean_name(name) for name, _ in inner.named_buffers()}

    @property
    def changed(self) -> bool:
        """Whether something was added, removed, replaced, frozen or moved since. Reads nothing of the tensors themselves."""
        return self.has_other_modules or self.trains_others

    @property
    def trains_others(self) -> bool:
        """Whether the optimizers have other tensors than they had, or other kinds of them."""
        return not (
            _same(_members(holders_of(self._optimizer)), self._members)
            and list(map(_trains, self._tensors)) == self._trains
            and ((self._plain and list(map(_place, self._tensors)) == self._places) or self._kept_kinds())
        )

    @property
    def has_other_modules(self) -> bool:
        """Whether modules, parameters or buffers are not those it had."""
        return not (
            _same(chain.from_iterable(map(_values, self._filled)), self._inside)
            and not any(self._empty)
            and list(map(len, self._buffers)) == self._counts
        )

    def _kept_kinds(self) -> bool:
        if list(map(_kind, self._tensors)) != self._kinds:
            return False
        self._places = list(map(_place, self._tensors)) if self._plain else []
        return True

    def holds(self, other: Structure) -> bool:
        """Whether a copy of the state of one is one of the other: the same modules and parameters, of the same shapes."""
        mine, theirs = self._named, other._named
        return (
            self._named_modules.keys() == other._named_modules.keys()
            and mine.keys() == theirs.keys()
            and all(mine[name] is theirs[name] for name in mine)
            and self._shapes == other._shapes
        )

    def since(self, before: Structure) -> str:
        """What changed, in words; empty where it is nothing that a user would name."""
        old, new = before._named, self._named
        held = {id(p) for p in before._tensors}, {id(p) for p in self._tensors}
        kinds = {id(p): kind for p, kind in zip(before._tensors, before._kinds, strict=True)}
        trained = {id(p): trains for p, trains in zip(before._tensors, before._trains, strict=True)}
        both = [name for name in new if name in old]
        kept = [name for name in both if new[name] is old[name]]
        found = {
            "replaced": [name for name in both if new[name] is not old[name]],
            "added": [name for name in new if name not in old],
            "removed": [name for name in old if name not in new],
            "now in the optimizer": [name for name in kept if id(new[name]) in held[1] - held[0]],
            "no longer in the optimizer": [name for name in kept if id(new[name]) in held[0] - held[1]],
            "of another dtype, device or shape": [n for n in kept if kinds.get(id(new[n]), _kind(new[n])) != _kind(new[n])],
            "frozen": [n for n in kept if trained.get(id(new[n])) is True and not new[n].requires_grad],
            "unfrozen": [n for n in kept if trained.get(id(new[n])) is False and new[n].requires_grad],
            "modules added": [name for name in self._named_modules if name not in before._named_modules],
            "buffers added": sorted(self._all_buffers - before._all_buffers),
        }
        return "; ".join(f"{what}: {listed(names)}" for what, names in found.items() if names)


def _members(holders: Iterable[Any]) -> list[Tensor]:
    return list(chain.from_iterable(group["params"] for holder in holders for group in holder.param_groups))


def _same(now: Iterable[Any], before: list[Any]) -> bool:
    now = list(now)
    return len(now) == len(before) and all(map(is_, now, before))
