"""Clipping under `nanproof run`: torch's own arithmetic, with the norms from before clipping kept.

`clip_grad_norm_` is `get_total_norm` and `clip_grads_with_norm_` under other names, so following the pair follows all three,
however a script came by them. A total norm that is not a number clips nothing: the evidence stays, and the step is refused.
If a gradient among them belongs to no guarded parameter, no step would be refused for it, so torch clips as always. That, and
clipping that a script writes itself, is followed by the engine, see `Engine.note_gradients`.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.utils._foreach_utils import (
    _device_has_foreach_support,
    _group_tensors_by_device_and_dtype,
    _has_foreach_support,
)

from nanproof.core.judge._parameters import is_dtensor
from nanproof.integrations._groups import gradients_of, referents
from nanproof.integrations._patches import Patches
from nanproof.integrations.script._runs import ScriptRuns
from nanproof.integrations.script._script_run import Clipped, ScriptRun
from nanproof.integrations.script._session import Session

version_of, _layout, _kind = attrgetter("_version"), attrgetter("layout"), attrgetter("device", "dtype")


class _Total(NamedTuple):
    """A total norm, and the gradients that it is of."""

    gradients: list[weakref.ref[Tensor]]
    versions: list[int]
    """How often each had been written."""
    norms: Tensor
    """Of each, stacked."""
    total: Tensor

    def holds_for(self, gradients: list[Tensor]) -> bool:
        """Whether these are the same gradients, in the same order, and nobody has written into them since."""
        return (
            len(gradients) == len(self.gradients)
            and all(map(is_, referents(self.gradients), gradients))
            and list(map(version_of, gradients)) == self.versions
        )

    def by_gradient(self) -> dict[int, tuple[weakref.ref[Tensor], int, Tensor]]:
        """By the id of each gradient: itself, how often it had been written, and its norm."""
        known = zip(self.gradients, self.versions, self.norms.unbind(), strict=True)
        return {id(g): (ref, version, norm) for ref, version, norm in known if (g := ref()) is not None}


class Clipping:
    """Follows a script's calls of torch's functions that clip."""

    def __init__(self, session: Session, runs: ScriptRuns) -> None:
        self._session, self._runs = session, runs
        self._last: _Total | None = None
        """The last total norm that was asked for."""

    def install(self, patches: Patches) -> None:
        names = (("get_total_norm", self.total_norm), ("clip_grads_with_norm_", self.clip_with_norm))
        for name, follow in names:
            for place, own in ((torch.nn.utils, name), (clip_grad, f"_{name}")):
                patches.set(place, own, _following(getattr(place, own), follow))
        for place in (torch.nn.utils, clip_grad):
            patches.set(place, "clip_grad_value_", _following(place.clip_grad_value_, self.clip_value))

    def total_norm(
        self, original: Any, tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> Tensor:
        """Keep the norms that the total is made of. A total that is not a number is not an error: the step will be refused."""
        tensors = [tensors] if isinstance(tensors, Tensor) else list(tensors)
        self._last = None
        if not tensors or not set(map(id, tensors)) <= set(map(id, gradients_of(self._guarded()))):
            return original(tensors, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
        if float(norm_type) != 2.0 or not _are_plain(tensors):
            return original(tensors, norm_type, False, foreach)  # type: ignore[no-any-return]
        if not foreach and _are_on_cpu_alike(tensors):
            gradients, norms = tensors, list(torch._foreach_norm(tensors, 2.0))  # the same kernel as one by one
        else:
            gradients, norms = [], []
            for (device, _), ([group], _) in _group_tensors_by_device_and_dtype([tensors]).items():
                several: list[Any] = list(group)
                supported = _device_has_foreach_support(device) if foreach else _has_foreach_support(several, device)
                if foreach and not supported:
                    return original(tensors, norm_type, False, foreach)  # type: ignore[no-any-return]
                together = supported and foreach is not False
                gradients += several
                norms += torch._foreach_norm(several, 2.0) if together else [torch.linalg.vector_norm(g, 2.0) for g in several]
        first = tensors[0].device
        stacked = torch.stack(norms if first.type == "cpu" else [norm.to(first) for norm in norms])
        total: Tensor = torch.linalg.vector_norm(stacked, 2.0)
        self._last = _Total(list(map(weakref.ref, gradients)), list(map(version_of, gradients)), stacked, total)
        return total

    def clip_with_norm(
        self, original: Any, parameters: Any, max_norm: float, total_norm: Tensor, foreach: bool | None = None
    ) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if self._clip_whole(original, parameters, max_norm, total_norm, foreach):
            return
        norms, whole = self._read(parameters, total_norm)
        if norms is None or not isinstance(total_norm, Tensor) or is_dtensor(total_norm):
            original(parameters, max_norm, total_norm, foreach)
            return
        before = [watched.before_clipping() for watched in self._runs.guarded()]
        # A total of 0 clips nothing.
        original(parameters, max_norm, torch.where(torch.isfinite(total_norm), total_norm, 0.0), foreach)
        self._clipped(parameters, norms, float(max_norm) if whole else None, before)

    def _clip_whole(self, original: Any, parameters: list[Tensor], max_norm: float, total: Any, foreach: bool | None) -> bool:
        """Clip all gradients of one run by the norm that was just asked for. Return False if it is not that: the general way
        asks parameter by parameter."""
        last, gradients = self._last, gradients_of(parameters)
        if last is None or total is not last.total or not last.holds_for(gradients):
            return False
        owners, own = list[tuple[ScriptRun, set[int]]](), set(map(id, gradients))
        for watched in self._runs.guarded():
            theirs = set(map(id, gradients_of(watched.parameters)))
            if not theirs.isdisjoint(own):
                owners.append((watched, theirs))
        if len(owners) != 1 or owners[0][1] != own or len(own) < len(gradients) or not owners[0][0].unclipped:
            return False
        (watched, _), self._last = owners[0], None
        before = watched.before_clipping()
        if foreach or not _are_on_cpu_alike(gradients):
            original(parameters, max_norm, torch.where(torch.isfinite(total), total, 0.0), foreach)
        else:
            _clip_on_cpu(gradients, float(max_norm), total)
        watched.clipped_whole(gradients, last.versions, last.norms, float(max_norm), before)
        for other in self._runs.guarded():
            if other is not watched and other.guard is not None and other.guard.late:
                other.clipped({}, None, other.before_clipping())
        return True

    def clip_value(self, original: Any, parameters: Any, clip_value: float, foreach: bool | None = None) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norms, _ = self._read(parameters, None)
        if norms is None:
            original(parameters, clip_value, foreach)
            return
        watching = self._runs.guarded()
        before = [watched.before_clipping() for watched in watching]
        # An Inf must not pass for the largest number allowed. Where the host waits anyway, it leaves the evidence alone.
        late = any(watched.guard is not None and watched.guard.late for watched in watching)
        if late or _all_finite([norm for _, norm in norms.values()]):
            original(parameters, clip_value, foreach)
        self._clipped(parameters, norms, None, before)

    def _read(self, parameters: list[Tensor], total: Tensor | None) -> tuple[dict[int, tuple[int, Tensor]] | None, bool]:
        """Return how often each gradient has been written and its norm, by parameter, and whether the total is that of these
        gradients. None if they are not followed."""
        last, self._last = self._last, None
        known = {} if last is None else last.by_gradient()
        owned = [(p, p.grad) for p in parameters if p.grad is not None]
        if not owned or not {id(p) for p, _ in owned} <= {id(p) for p in self._guarded()}:
            return None, False
        if not all(_is_plain(g) for _, g in owned):
            self._session.say_once(
                "sparse or sharded gradients are clipped, which nanproof does not follow: their norms are read after clipping"
            )
            return None, False
        norms: dict[int, tuple[int, Tensor]] = {}
        for p, g in owned:
            ref, version, norm = known.get(id(g), (None, 0, None))
            if ref is not None and norm is not None and ref() is g and version == g._version:
                norms[id(p)] = version, norm
        whole = total is not None and last is not None and total is last.total and len(norms) == len(owned) == len(known)
        unknown = [(p, g) for p, g in owned if id(p) not in norms]
        grouped: Any = _group_tensors_by_device_and_dtype([[g for _, g in unknown]], with_indices=True) if unknown else {}
        for [gradients], places in grouped.values():
            for place, norm in zip(places, torch._foreach_norm(gradients, 2.0), strict=True):
                p, g = unknown[place]
                norms[id(p)] = g._version, norm
        return norms, whole

    def _guarded(self) -> list[Tensor]:
        """The parameters whose steps are judged."""
        guarded = self._runs.guarded()
        return guarded[0].parameters if len(guarded) == 1 else [p for watched in guarded for p in watched.parameters]

    def _clipped(
        self, parameters: list[Tensor], norms: dict[int, tuple[int, Tensor]], max_norm: float | None, before: list[Any]
    ) -> None:
        kept = {id(p): Clipped(p.grad, *norms[id(p)], p.grad._version) for p in parameters if p.grad is not None}
        for watched, gradients in zip(self._runs.guarded(), before, strict=True):
            watched.clipped(kept, max_norm, gradients)


def _following(original: Callable[..., Any], follow: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():  # as in clip_grad_norm_, which turned it off
            return follow(original, *args, **kwargs)
        with torch.no_grad():
            return follow(original, *args, **kwargs)

    return function


def _all_finite(norms: list[Tensor]) -> bool:
    """Waits for the device, once."""
    return bool(torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite().all())


def _clip_on_cpu(gradients: list[Tensor], max_norm: float, total: Tensor) -> None:
    """Do what torch does, to the last bit: where the factor is 1, nothing. A total that is not a number clips nothing."""
    if not math.isfinite(total.item()):
        return
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    if factor.item() != 1.0:
        torch._foreach_mul_(gradients, factor)


def _is_plain(gradient: Tensor) -> bool:
    return gradient.layout is torch.strided and not is_dtensor(gradient)


def _are_plain(gradients: list[Tensor]) -> bool:
    return (set(map(type, gradients)) == {Tensor} and set(map(_layout, gradients)) == {torch.strided}) or all(
        map(_is_plain, gradients)
    )


def _are_on_cpu_alike(gradients: list[Tensor]) -> bool:
    """Whether they are plain tensors of one dtype on the CPU."""
    kinds = set(map(_kind, gradients))
    return len(kinds) == 1 and next(iter(kinds))[0].type == "cpu" and set(map(type, gradients)) == {Tensor}
