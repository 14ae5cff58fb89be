"""State that a refused step must not change, besides what the optimizer kernel leaves alone by itself.

`BufferKeeper`: the buffers that a forward writes (running statistics, counters). They change before the verdict is
known, so a copy of the last accepted state is kept and put back on the device when the verdict says skip.

`WeightKeeper`: half-precision weights. There the optimizer's own arithmetic can make a weight non-finite from finite
gradients, so weights and moments are looked at after the step and, where a copy was taken, put back.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanproof.core.parameters import local, unwrap

Key: TypeAlias = tuple[nn.Module, str]
"""A buffer: its owner and its name there."""
_SMALL = 1 << 20
"""Buffers up to this many bytes are always kept; larger ones (masks, tables) from the first step that writes them."""


@dataclass(frozen=True, slots=True)
class _Flat:
    """All kept buffers of one dtype as two vectors: a few kernels settle them, however many there are."""

    keys: list[Key]
    live: list[Tensor]
    kept: list[Tensor]
    now: Tensor
    was: Tensor

    @classmethod
    def of(cls, members: list[tuple[Key, Tensor, Tensor]]) -> _Flat:
        keys, live, kept = (list(column) for column in zip(*members, strict=True))
        return cls(keys, live, kept, torch.cat([x.reshape(-1) for x in live]), torch.cat([x.reshape(-1) for x in kept]))


class BufferKeeper:
    """Keeps a copy of every buffer that the forward writes, and puts it back on a refused step."""

    def __init__(self, model: nn.Module) -> None:
        self._model = unwrap(model)
        self._owners: list[nn.Module] = []
        self._kept: dict[Key, Tensor] = {}
        self._large: dict[Key, tuple[Tensor, int]] = {}
        self._flat: list[_Flat] = []
        self._layout: list[tuple[Key, int]] = []
        self.refresh()
        self._hook = self._model.register_load_state_dict_post_hook(lambda *_: self.refresh())

    def refresh(self) -> None:
        """Take the buffers as they are now for good: at the start, and after weights were loaded."""
        self._owners = [module for module in self._model.modules() if module._buffers]
        self._kept.clear()
        self._large.clear()
        for key, buffer in self._buffers():
            if buffer.numel() * buffer.element_size() <= _SMALL or isinstance(key[0], nn.modules.batchnorm._NormBase):
                self._kept[key] = buffer.detach().clone()
            else:
                self._large[key] = (buffer, buffer._version)

    def look(self) -> Tensor | None:
        """After the forward: 0 if all is well, else 1 + the place of the first element that it made non-finite, for `name_at`.

        On the device; None where no buffer can go bad.
        """
        groups: dict[Any, list[tuple[Key, Tensor, Tensor]]] = {}
        for key, buffer in self._buffers():
            kept = self._kept.get(key)
            if kept is None or kept.shape != buffer.shape or kept.dtype != buffer.dtype or kept.device != buffer.device:
                self._admit(key, buffer)
            else:
                groups.setdefault((buffer.device, buffer.dtype), []).append((key, local(buffer.detach()), local(kept)))
        self._flat = [_Flat.of(members) for members in groups.values()]
        bad = [~torch.isfinite(flat.now) & torch.isfinite(flat.was) for flat in self._flat if flat.now.is_floating_point()]
        if not bad:
            return None
        marks = bad[0] if len(bad) == 1 else torch.cat([x.to(bad[0].device, non_blocking=True) for x in bad])
        floating = [flat for flat in self._flat if flat.now.is_floating_point()]
        self._layout = [(key, live.numel()) for flat in floating for key, live in zip(flat.keys, flat.live, strict=True)]
        return torch.where(marks.any(), marks.to(torch.uint8).argmax() + 1, 0)

    def name_at(self, place: int) -> str:
        """The buffer that `look` pointed at."""
        for (owner, name), size in self._layout:
            place -= size
            if place <= 0:
                path = next((path for path, module in self._model.named_modules() if module is owner), "")
                return f"{path}.{name}" if path else name
        return "a buffer"

    def settle(self, refused: Tensor) -> None:
        """After the verdict: where it says so, put back the kept values; else keep the new ones. No host wait."""
        for flat in self._flat:
            good = torch.where(refused.to(flat.now.device, non_blocking=True), flat.was, flat.now)
            parts = [part.view_as(live) for part, live in zip(good.split([x.numel() for x in flat.live]), flat.live, strict=True)]
            torch._foreach_copy_(flat.live, parts)
            torch._foreach_copy_(flat.kept, parts)
        self._flat = []

    def restore(self) -> None:
        """Put back the kept values now."""
        self.look()
        for flat in self._flat:
            torch._foreach_copy_(flat.live, flat.kept)
        self._flat = []

    def close(self) -> None:
        self._hook.remove()

    def _admit(self, key: Key, buffer: Tensor) -> None:
        """A buffer seen for the first time, or a large one that the forward turned out to write."""
        known = self._large.get(key)
        if known is not None and known[0] is buffer and known[1] == buffer._version:
            return
        if known is None and buffer.numel() * buffer.element_size() > _SMALL and key not in self._kept:
            self._large[key] = (buffer, buffer._version)
            return
        self._large.pop(key, None)
        self._kept[key] = buffer.detach().clone()

    def _buffers(self) -> list[tuple[Key, Tensor]]:
        return [
            ((module, name), buffer)
            for module in self._owners
            for name, buffer in module._buffers.items()
            if buffer is not None and buffer.layout is torch.strided and not buffer.is_meta
        ]


class WeightKeeper:
    """Looks at half-precision weights and moments after a step; with `restore`, puts back what the step broke."""

    def __init__(self, weights: list[Tensor], optimizer: Optimizer, restore: bool) -> None:
        self.restore = restore
        self._weights = weights
        self._optimizer = optimizer
        self._saved: list[tuple[Tensor, Tensor, dict[str, Any]]] = []

    @staticmethod
    def needed(weights: list[Tensor], on_device: bool, choice: str) -> tuple[list[Tensor], bool]:
        """Which weights to look at, and whether to copy them first."""
        half = [p for p in weights if p.requires_grad and p.dtype in (torch.float16, torch.bfloat16)]
        if choice == "off":
            return [], False
        if choice == "auto":
            return half, not on_device or any(p.dtype == torch.float16 for p in half)
        return half, choice == "restore"

    def save(self) -> None:
        if self.restore:
            self._saved = [
                (p, p.detach().clone(), {k: _clone(v) for k, v in self._optimizer.state.get(p, {}).items()})
                for p in self._weights
            ]

    def broken(self) -> Tensor:
        """Bool on the device: some weight or moment is non-finite now."""
        tensors = [local(p.detach()) for p in self._weights]
        for p in self._weights:
            state = self._optimizer.state.get(p, {}).values()
            tensors += [local(x) for x in state if isinstance(x, Tensor) and x.is_floating_point() and x.dim()]
        largest = torch.stack([n.to(tensors[0].device, torch.float32) for n in torch._foreach_norm(tensors, torch.inf)])
        return ~torch.isfinite(largest).all()

    def put_back(self, broken: Tensor) -> None:
        """Undo the step where `broken` says so, on the device. State that the step created goes back to zeros."""
        with torch.no_grad():
            for p, weight, state in self._saved:
                _where(broken, weight, p)
                for key, value in self._optimizer.state.get(p, {}).items():
                    if isinstance(value, Tensor):
                        _where(broken, state.get(key, torch.zeros_like(value)), value)
        self._saved = []

    def put_back_now(self) -> None:
        """Undo the step; the host already knows that it must be. State that the step created is removed."""
        with torch.no_grad():
            for p, weight, state in self._saved:
                p.copy_(weight)
                if state:
                    self._optimizer.state[p] = state
                else:
                    self._optimizer.state.pop(p, None)
        self._saved = []


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def _where(condition: Tensor, old: Tensor, live: Tensor) -> None:
    live, old = local(live.detach()), local(old)
    live.copy_(torch.where(condition.to(live.device, non_blocking=True), old, live))
