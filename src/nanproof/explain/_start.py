"""How large each weight was when the run began, and which buffers were non-finite: measured once on the device, read only if
something goes wrong.

A weight that is NaN at step 900 may have been NaN in the checkpoint, in a layer that no batch used, or may have been broken
since. A weight that is 1e18 may have been so all along. The fixes differ.
"""

from __future__ import annotations

import logging
import weakref

import torch
from torch import Tensor, nn

from nanproof.core.judge._parameters import clean_name, local, unwrap

log = logging.getLogger("nanproof")

LARGEST_ON_CPU = 1 << 28
"""Elements of weights on the CPU; larger models are not measured there, because it takes time."""


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
