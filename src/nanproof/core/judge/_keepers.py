"""State that a refused step must not change, besides what the optimizer kernel leaves alone by itself.

`BufferKeeper`: the buffers that a forward writes (running statistics, counters). They change before the verdict is
known, so a copy of the last accepted state is kept and put back on the device when the verdict says skip.

`WeightKeeper`: half-precision weights. There the optimizer's own arithmetic can make a weight non-finite from finite
gradients, so weights and moments are looked at after the step and, where a copy was taken, put back.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from nanproof.core.judge._parameters import is_compiled, is_dtensor, local, unwrap
from nanproof.core.support._hooks import Hook
from nanproof.core.support._ranks import Ranks

Key: TypeAlias = tuple[nn.Module, str]
"""A buffer: its owner and its name there."""
_SMALL = 1 << 20
"""Buffers up to this many bytes are always kept; larger masks and tables from the first step that writes them."""
_HALF = (torch.float16, torch.bfloat16)


@dataclass(slots=True)
class _Flat:
    """The kept values of all buffers of one dtype and device, end to end: few kernels settle them, however many there are."""

    keys: list[Key]
    shapes: list[torch.Size]
    was: Tensor
    """The values at the last accepted step."""
    now: Tensor
    """The values after this step's forward."""
    meant: Tensor
    """Bool: infinite from the start, and so on purpose (a mask of -inf)."""

    def live(self) -> list[Tensor]:
        return [local(owner._buffers[name].detach()) for owner, name in self.keys]  # type: ignore[union-attr]

    def write(self, values: Tensor) -> None:
        parts = values.split([shape.numel() for shape in self.shapes])
        torch._foreach_copy_(self.live(), [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)])


class BufferKeeper:
    """Keeps a copy of every buffer that the forward writes, and puts it back on a refused step.

    The copy is taken at the first training forward after a step (a hook on the model that is called), so that what other code
    does to buffers between steps is not undone.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = unwrap(model)
        self._owners: list[nn.Module] = []
        self._flats: list[_Flat] = []
        self._layout: list[tuple[Key, Any]] = []
        self._replaced: dict[Key, Tensor | None] = {}
        """Buffers that this step's forward made anew in another shape, or for the first time, and what was there before."""
        self._known: set[Key] = set()
        """All buffers there were when the step began."""
        self._untouched: dict[Key, tuple[Tensor, int]] = {}
        """Large buffers, and their versions, that no forward has written yet."""
        self._in_step = False
        self.refresh()
        self._hooks = [self._model.register_load_state_dict_post_hook(Hook(self, self._on_load))]
        if not is_compiled(model):
            self._hooks.append(model.register_forward_pre_hook(Hook(self, self._on_forward)))

    @property
    def in_step(self) -> bool:
        """Whether a step has begun and the buffers from before it are kept."""
        return self._in_step

    def refresh(self) -> None:
        """Take the buffers as they are now for good: at the start, and after weights were loaded."""
        self._owners = [module for module in self._model.modules() if module._buffers]
        self._untouched = {key: (buffer, buffer._version) for key, buffer in self._all() if not _always_kept(key, buffer)}
        self._replaced = {}
        self._rebuild({})
        self._known = {*(key for key, _ in self._layout), *self._untouched}

    def begin(self) -> None:
        """A step begins: keep the buffers as they are now."""
        self._in_step = True
        self._find_written()
        if self._layout != self._current_layout():
            self._rebuild({})
        self._known = {*(key for key, _ in self._layout), *self._untouched}
        for flat in self._flats:
            flat.was = _concatenate(flat.live())

    def look(self) -> Tensor | None:
        """After the forward: 0 if all is well, else 1 + the place of the first element that it made non-finite, for `name_at`.

        On the device; None where no buffer can go bad.
        """
        self._notice_changes()
        for flat in self._flats:
            flat.now = _concatenate(flat.live())
        bad = [_worse(flat) for flat in self._floating()]
        if not bad:
            return None
        marks = bad[0] if len(bad) == 1 else torch.cat([x.to(bad[0].device, non_blocking=True) for x in bad])
        return torch.where(marks.any(), marks.to(torch.uint8).argmax() + 1, 0)

    def name_at(self, place: int) -> str:
        """The buffer that `look` pointed at."""
        for flat in self._floating():
            for key, shape in zip(flat.keys, flat.shapes, strict=True):
                place -= shape.numel()
                if place <= 0:
                    return self._name(key)
        return "a buffer"

    def bad_now(self) -> Tensor | None:
        """Whether a buffer is non-finite now that is not so on purpose, on the device; None where none can be."""
        bad = [(~torch.isfinite(_concatenate(flat.live())) & ~flat.meant).any() for flat in self._floating()]
        return torch.stack([x.to(bad[0].device, non_blocking=True) for x in bad]).any() if bad else None

    def broken(self) -> list[str]:
        """Names of the buffers that are non-finite now, without those that are infinite on purpose. Waits: for failures."""
        bad = []
        for flat in self._floating():
            marks = ~torch.isfinite(_concatenate(flat.live())) & ~flat.meant
            parts = marks.split([shape.numel() for shape in flat.shapes])
            bad += [self._name(key) for key, part in zip(flat.keys, parts, strict=True) if part.any()]
        return bad

    def settle(self, refused: Tensor) -> None:
        """After the verdict, where it says so, put back the kept values; else keep the new ones, but never a non-finite number
        in the place of a finite one. Waits for no device, save in the rare step that changed a buffer's shape."""
        self._in_step = False
        if self._replaced and refused:
            self._undo_changes()
        self._replaced = {}
        for flat in self._flats:
            if flat.now.device.type != "cpu":
                back = refused.to(flat.now.device, non_blocking=True)
                if flat.now.is_floating_point():
                    back = back | _worse(flat)
                flat.was = torch.where(back, flat.was, flat.now)
                flat.write(flat.was)
            elif refused:
                flat.write(flat.was)
            elif flat.now.is_floating_point() and (worse := _worse(flat)).any():
                flat.was = torch.where(worse, flat.was, flat.now)
                flat.write(flat.was)
            else:
                flat.was = flat.now

    def restore(self) -> None:
        """Put back the kept values now."""
        self._in_step = False
        self._notice_changes()
        self._undo_changes()
        for flat in self._flats:
            flat.write(flat.was)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _on_load(self, *_: Any) -> None:
        self.refresh()

    def _on_forward(self, module: nn.Module, _inputs: Any) -> None:
        if not self._in_step and module.training and torch.is_grad_enabled():
            self.begin()

    def _find_written(self) -> dict[Key, Tensor]:
        """Large buffers that were written after all are kept from now on. Returns those that were bound anew, as they were; of
        one that was written in place the old values are gone."""
        rebound = {}
        for key, (buffer, version) in list(self._untouched.items()):
            owner, name = key
            if owner._buffers.get(name) is not buffer:
                rebound[key] = buffer
                del self._untouched[key]
            elif buffer._version != version:
                del self._untouched[key]
        return rebound

    def _notice_changes(self) -> None:
        """Note which buffers this step's forward bound anew in another shape, or for the first time."""
        self._replaced |= {key: old for key, old in self._find_written().items() if key not in self._replaced}
        layout = self._current_layout()
        if self._layout == layout:
            return
        kept = {key: part for flat in self._flats for key, part in _parts(flat)}
        before = dict(self._layout)
        for key, facts in layout:
            if before.get(key) != facts and key not in self._replaced:
                if key in kept:
                    self._replaced[key] = kept[key].clone()
                elif key not in self._known:
                    self._replaced[key] = None
        self._rebuild(kept)

    def _undo_changes(self) -> None:
        if not self._replaced:
            return
        kept = {key: part for flat in self._flats for key, part in _parts(flat)}
        for (owner, name), old in self._replaced.items():
            owner._buffers[name] = old
        kept.update({key: old for key, old in self._replaced.items() if old is not None})
        self._replaced = {}
        self._rebuild(kept)

    def _all(self) -> Iterator[tuple[Key, Tensor]]:
        for module in self._owners:
            for name, buffer in module._buffers.items():
                if buffer is not None and _can_be_kept(buffer):
                    yield (module, name), buffer

    def _current_layout(self) -> list[tuple[Key, Any]]:
        return [(key, (x.device, x.dtype, x.shape)) for key, x in self._all() if key not in self._untouched]

    def _rebuild(self, kept: dict[Key, Tensor]) -> None:
        """Lay the kept values out anew; `kept` holds those that must survive, the rest are taken as they are now."""
        self._layout = self._current_layout()
        groups: dict[Any, list[Key]] = {}
        for key, (device, dtype, _) in self._layout:
            groups.setdefault((device, dtype), []).append(key)
        self._flats = []
        for (device, dtype), keys in groups.items():
            live = [local(owner._buffers[name].detach()) for owner, name in keys]  # type: ignore[union-attr]
            usable = []
            for key, now in zip(keys, live, strict=True):
                old = kept.get(key)
                same = old is not None and (old.shape, old.dtype, old.device) == (now.shape, dtype, device)
                usable.append(old if old is not None and same else now)
            was = _concatenate(usable)
            self._flats.append(_Flat(keys, [x.shape for x in live], was, _concatenate(live), torch.isinf(was)))

    def _name(self, key: Key) -> str:
        path = next((path for path, module in self._model.named_modules() if module is key[0]), "")
        return f"{path}.{key[1]}" if path else key[1]

    def _floating(self) -> list[_Flat]:
        return [flat for flat in self._flats if flat.now.is_floating_point()]


def _always_kept(key: Key, buffer: Tensor) -> bool:
    """Small buffers, and those that are part of a model's state and no mask: codebooks, running statistics."""
    owner, name = key
    state = buffer.is_floating_point() and name not in owner._non_persistent_buffers_set
    return state or buffer.numel() * buffer.element_size() <= _SMALL


def _can_be_kept(buffer: Tensor) -> bool:
    """Not: numbers of a byte or less (quantised weights), memory that several elements share, what autograd may not touch."""
    if buffer.layout is not torch.strided or buffer.is_meta or buffer.is_inference() or not buffer.numel():
        return False
    if buffer.is_floating_point() and buffer.element_size() < 2:
        return False
    return all(stride > 0 or size == 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True))


def _worse(flat: _Flat) -> Tensor:
    """Where a number was finite and is not any more."""
    return ~torch.isfinite(flat.now) & torch.isfinite(flat.was)


def _concatenate(tensors: list[Tensor]) -> Tensor:
    return torch.cat([x.reshape(-1) for x in tensors])


def _parts(flat: _Flat) -> Iterator[tuple[Key, Tensor]]:
    parts = flat.was.split([shape.numel() for shape in flat.shapes])
    for key, shape, part in zip(flat.keys, flat.shapes, parts, strict=True):
        yield key, part.view(shape)


class WeightKeeper:
    """Looks at half-precision weights and moments after a step; with `restore`, undoes a step that broke one of them: on all
    weights, the others of the step included."""

    def __init__(self, weights: list[Tensor], optimizer: Optimizer, restore: bool, ranks: Ranks) -> None:
        self.restore = restore
        self._half = [p for p in weights if p.dtype in _HALF]
        self._all = weights
        self._optimizer = optimizer
        self._agree = ranks.any_rank if any(is_dtensor(p) for p in weights) else None
        self._saved: list[tuple[Tensor, Tensor, dict[str, Any]]] = []

    @classmethod
    def of(cls, weights: list[Tensor], optimizer: Optimizer, on_device: bool, choice: str, ranks: Ranks) -> WeightKeeper | None:
        """None where no trainable weight is half precision, or the policy does not want to know."""
        trainable = [p for p in weights if p.requires_grad]
        dtypes = {p.dtype for p in trainable if p.dtype in _HALF}
        if choice == "off" or not dtypes:
            return None
        restore = choice == "restore" or (choice == "auto" and (not on_device or torch.float16 in dtypes))
        return cls(trainable, optimizer, restore, ranks)

    def save(self) -> None:
        if self.restore:
            states = self._optimizer.state
            self._saved = [(p, p.detach().clone(), {k: _clone(v) for k, v in states.get(p, {}).items()}) for p in self._all]

    def broken(self) -> Tensor:
        """Bool on the device: some half-precision weight or moment is non-finite now. Of sharded weights each rank has a part,
        so the ranks agree: one small collective."""
        tensors = [local(p.detach()) for p in self._half]
        for p in self._half:
            state = self._optimizer.state.get(p, {}).values()
            tensors += [local(x) for x in state if isinstance(x, Tensor) and x.is_floating_point() and x.dim()]
        tensors = [t for t in tensors if t.numel()]
        if not tensors:
            bad = torch.zeros((), dtype=torch.bool, device=self._half[0].device)
        else:
            largest = [n.to(tensors[0].device, torch.float32) for n in torch._foreach_norm(tensors, torch.inf)]
            bad = ~torch.isfinite(torch.stack(largest)).all()
        return bad if self._agree is None else self._agree(bad)

    def put_back(self, broken: Tensor, last: bool = True) -> None:
        """Undo the step where `broken` says so, on the device. State that the step created goes back to zeros. Not `last`: other
        optimizers have still to act in this step."""
        with torch.no_grad():
            for p, weight, state in self._saved:
                _where(broken, weight, p)
                for key, value in self._optimizer.state.get(p, {}).items():
                    if isinstance(value, Tensor):
                        _where(broken, state.get(key, torch.zeros_like(value)), value)
        if last:
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
