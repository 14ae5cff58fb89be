"""Clipping under `nanproof run`: torch's own arithmetic, with the norms from before clipping kept.

`clip_grad_norm_` is `get_total_norm` and `clip_grads_with_norm_` under other names, so following the pair follows all three,
however a script came by them. A total norm that is not a number clips nothing: the evidence stays, and the step is refused.
If a gradient among them belongs to no guarded parameter, no step would be refused for it, so torch clips as always. That, and
clipping that a script writes itself, is followed by the engine, see `Engine.note_gradients`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.utils._foreach_utils import (
    _device_has_foreach_support,
    _group_tensors_by_device_and_dtype,
    _has_foreach_support,
)

from nanproof.core.judge._parameters import is_dtensor
from nanproof.integrations._patches import Patches
from nanproof.integrations.script._runs import ScriptRuns
from nanproof.integrations.script._script_run import Clipped
from nanproof.integrations.script._session import Session


class Clipping:
    """Follows a script's calls of torch's functions that clip."""

    def __init__(self, session: Session, runs: ScriptRuns) -> None:
        self._session, self._runs = session, runs
        self._norms: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        """Of the last total norm, by gradient: the gradient, how often it had been written, and its norm."""
        self._total: Tensor | None = None

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
        self._norms, self._total = {}, None
        if not tensors or not {id(g) for g in tensors} <= {id(p.grad) for p in self._guarded()}:
            return original(tensors, norm_type, error_if_nonfinite, foreach)  # type: ignore[no-any-return]
        if float(norm_type) != 2.0 or not all(map(_is_plain, tensors)):
            return original(tensors, norm_type, False, foreach)  # type: ignore[no-any-return]
        pairs: list[tuple[Tensor, Tensor]] = []
        for (device, _), ([group], _) in _group_tensors_by_device_and_dtype([tensors]).items():
            gradients: list[Any] = list(group)
            if (foreach is None and _has_foreach_support(gradients, device)) or (foreach and _device_has_foreach_support(device)):
                norms = list(torch._foreach_norm(gradients, 2.0))
            elif foreach:
                return original(tensors, norm_type, False, foreach)  # type: ignore[no-any-return]
            else:
                norms = [torch.linalg.vector_norm(g, 2.0) for g in gradients]
            pairs += zip(gradients, norms, strict=True)
        first = tensors[0].device
        total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(first) for _, norm in pairs]), 2.0)
        self._norms, self._total = {id(g): (weakref.ref(g), g._version, norm) for g, norm in pairs}, total
        return total

    def clip_with_norm(
        self, original: Any, parameters: Any, max_norm: float, total_norm: Tensor, foreach: bool | None = None
    ) -> None:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        norms, whole = self._read(parameters, total_norm)
        if norms is None or not isinstance(total_norm, Tensor) or is_dtensor(total_norm):
            original(parameters, max_norm, total_norm, foreach)
            return
        before = [watched.before_clipping() for watched in self._runs.guarded()]
        # A total of 0 clips nothing.
        original(parameters, max_norm, torch.where(torch.isfinite(total_norm), total_norm, 0.0), foreach)
        self._clipped(parameters, norms, float(max_norm) if whole else None, before)

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
        (known, made), self._norms, self._total = (self._norms, self._total), {}, None
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
        whole = total is not None and total is made and len(norms) == len(owned) == len(known)
        unknown = [(p, g) for p, g in owned if id(p) not in norms]
        grouped: Any = _group_tensors_by_device_and_dtype([[g for _, g in unknown]], with_indices=True) if unknown else {}
        for [gradients], places in grouped.values():
            for place, norm in zip(places, torch._foreach_norm(gradients, 2.0), strict=True):
                p, g = unknown[place]
                norms[id(p)] = g._version, norm
        return norms, whole

    def _guarded(self) -> list[Tensor]:
        """The parameters whose steps are judged."""
        return [p for watched in self._runs.guarded() for p in watched.parameters]

    def _clipped(
        self, parameters: list[Tensor], norms: dict[int, tuple[int, Tensor]], max_norm: float | None, before: list[Any]
    ) -> None:
        kept = {id(p): Clipped(p.grad, *norms[id(p)], p.grad._version) for p in parameters if p.grad is not None}
        for watched, gradients in zip(self._runs.guarded(), before, strict=True):
            watched.clipped(kept, max_norm, gradients)


def _following(original: Callable[..., Any], follow: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return follow(original, *args, **kwargs)

    return function


def _all_finite(norms: list[Tensor]) -> bool:
    """Waits for the device, once."""
    return bool(torch.stack([norm.to(norms[0].device) for norm in norms]).isfinite().all())


def _is_plain(gradient: Tensor) -> bool:
    return gradient.layout is torch.strided and not is_dtensor(gradient)
