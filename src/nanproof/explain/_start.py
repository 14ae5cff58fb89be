"""What weights and buffers were when the run began: how large each weight was, which buffers were non-finite, and which hold
numbers that nobody wrote. Weights are measured once on the device, and read only if something goes wrong.

A weight that is NaN at step 900 may have been NaN in the checkpoint, in a layer that no batch used, or may have been broken
since. A weight that is 1e18 may have been so all along. The fixes differ.
"""

from __future__ import annotations

import logging
import re
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanproof.core.judge._parameters import clean_name, is_dtensor, local, unwrap

log = logging.getLogger("nanproof")

LARGEST_ON_CPU = 1 << 28
"""Elements of weights on the CPU; larger models are not measured there, because it takes time."""


WILD = 3.0
"""Powers of ten between neighbours in a buffer, in the middle, that no computation gives."""
LARGEST_BUFFER = 1 << 22
"""Elements of a buffer; larger ones are not checked."""


class WeightsAtStart:
    """The largest number of each weight, on its device."""

    def __init__(self, model: nn.Module) -> None:
        self._parts: list[tuple[list[tuple[str, weakref.ref[Tensor]]], Tensor]] = []
        self._buffers: dict[str, Tensor] = {}
        """How many numbers of each buffer are infinite."""
        try:
            self._ask(model)
        except Exception:
            log.debug("nanproof: the weights could not be looked at", exc_info=True)
            self._parts = []

    @torch.no_grad()
    def _ask(self, model: nn.Module) -> None:
        named = [(clean_name(name), p) for name, p in unwrap(model).named_parameters()]
        usable = [(name, p, local(p.detach())) for name, p in named if p.is_floating_point() and not p.is_meta]
        usable = [(name, p, t) for name, p, t in usable if t.layout is torch.strided and t.numel() and t.element_size() > 1]
        if sum(t.numel() for _, _, t in usable if t.device.type == "cpu") > LARGEST_ON_CPU:
            return
        groups: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor, Tensor]]] = {}
        for name, p, t in usable:
            groups.setdefault((t.device, t.dtype), []).append((name, p, t))
        for members in groups.values():
            largest = torch.stack(torch._foreach_norm([t for _, _, t in members], torch.inf))
            self._parts.append(([(name, weakref.ref(p)) for name, p, _ in members], largest))

        for name, buffer in unwrap(model).named_buffers():
            if (
                buffer.is_floating_point()
                and not buffer.is_meta
                and buffer.layout is torch.strided
                and buffer.numel() < LARGEST_BUFFER
            ):
                self._buffers[clean_name(name)] = torch.isinf(local(buffer.detach())).sum()

    def unchanged_bounds(self, model: nn.Module) -> set[str]:
        """Names of buffers that hold as many infinite numbers as at the start, and no NaN: a bound that is Inf on purpose is not
        to blame. Waits: for failures."""
        now = {clean_name(name): local(buffer.detach()) for name, buffer in unwrap(model).named_buffers()}
        counts = {name: int(count) for name, count in self._buffers.items() if name in now}
        return {
            name
            for name, count in counts.items()
            if count and int(torch.isinf(now[name]).sum()) == count and not bool(torch.isnan(now[name]).any())
        }

    def largest(self, model: nn.Module) -> dict[str, float] | None:
        """Return the largest absolute value of each weight that is the same tensor now; None if they were not measured. Waits
        for the device."""
        if not self._parts:
            return None
        now = {clean_name(name): p for name, p in unwrap(model).named_parameters()}
        return {
            name: value
            for members, values in self._parts
            for (name, reference), value in zip(members, values.tolist(), strict=True)
            if reference() is now.get(name)
        }


@dataclass(frozen=True, slots=True, eq=False)
class Garbage:
    """A buffer that holds what nobody wrote."""

    name: str
    buffer: Tensor
    seen: str
    fresh: Tensor | None
    """As a module of the same class and config has it."""
    ordinary: Tensor

    def compared(self) -> str:
        assert self.fresh is not None
        low, high = torch.aminmax(self.fresh.float())
        return f"a new {self.name.rpartition('.')[2]} from the same config lies within {float(low):.3g} and {float(high):.3g}"


def garbage_buffers(model: nn.Module) -> list[Garbage]:
    """Return the buffers that hold numbers which only unwritten memory has. Waits for the device."""
    found, seen = [], set()
    for path, module in unwrap(model).named_modules():
        for key, buffer in module._buffers.items():
            if buffer is None or id(buffer) in seen or not _readable(buffer):
                continue
            seen.add(id(buffer))
            what = _unwritten(key, buffer.detach().float())
            if what:
                fresh = _fresh(module, key)
                if fresh is not None and bool((fresh == buffer).all()):
                    continue  # odd, and meant
                name = clean_name(f"{path}.{key}" if path else key)
                found.append(Garbage(name, buffer, what, fresh, _ordinary(key, buffer)))
    return found


def _readable(buffer: Tensor) -> bool:
    small = 1 < buffer.numel() <= 1 << 20
    return (
        buffer.is_floating_point() and small and buffer.layout is torch.strided and not buffer.is_meta and not is_dtensor(buffer)
    )


def _unwritten(key: str, value: Tensor) -> str:
    """Why these numbers cannot be meant; empty where they can."""
    if not bool(torch.isfinite(value).all()):
        return ""  # a cause of its own
    size = value.abs()
    huge = value[size > 1e15]
    magnitudes = size[size > 0].log10()
    steps = magnitudes.diff()
    steady = magnitudes.numel() >= 8 and bool((steps >= 0).all() | (steps <= 0).all())  # powers of two, say
    if huge.numel() and float(huge.min()) != float(huge.max()) and not steady:
        return f"numbers from {float(size.min()):.3g} to {float(size.max()):.3g}"
    # The tails of a Gaussian fall as fast, but each step is much like the one before.
    if magnitudes.numel() >= 4 and min(float(steps.abs().median()), float(steps.diff().abs().median())) > WILD:
        return f"numbers of any size side by side, from {float(size[size > 0].min()):.3g} to {float(size.max()):.3g}"
    if _is_variance(key) and float(value.min()) < 0:
        return f"a variance of {float(value.min()):.3g}"
    if key.endswith("inv_freq") and value.dim() == 1:
        falls = bool((value[1:] <= value[:-1]).all())
        if not falls or float(value.min()) <= 0 or float(value.max()) > 1.01:
            return f"frequencies from {float(value.min()):.3g} to {float(value.max()):.3g}, which do not fall from 1 towards 0"
    return ""


def _ordinary(key: str, buffer: Tensor) -> Tensor:
    """What such a buffer usually holds: frequencies of a rotation, variances of 1, means of 0."""
    if key.endswith("inv_freq") and buffer.dim() == 1:
        return (1e4 ** -(torch.arange(len(buffer)) / len(buffer))).to(buffer)
    return torch.full_like(buffer, 1.0 if _is_variance(key) or "scale" in key else 0.0)


def _is_variance(key: str) -> bool:
    """By its name. The logarithm of a variance may be negative, and so may a covariance."""
    return re.search(r"(^|_)var(iance)?s?$", key) is not None and "log" not in key


def _fresh(module: nn.Module, key: str) -> Tensor | None:
    """The buffer of a module that is made anew from the same config; None where that cannot be done."""
    config = getattr(module, "config", None)
    buffer = module._buffers[key]
    if config is None or buffer is None:
        return None
    try:
        made = type(module)(config)._buffers[key]
    except Exception:
        return None
    return made.to(buffer) if made is not None and made.shape == buffer.shape else None
