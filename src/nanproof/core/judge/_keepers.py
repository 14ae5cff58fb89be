"""State that a refused step must not change, besides what the optimizer leaves alone by itself.

`BufferKeeper`: what a forward writes: buffers (running statistics, counters), and parameters that no optimizer trains (a
momentum encoder, the average of weights). They change before the verdict is known, so a copy of the last accepted state is kept
and put back on the device when the verdict says skip.

`Attributes`: tensors that modules keep in plain attributes (a hidden state, a queue). The host puts those back: writing into
one could be writing into the user's batch.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, methodcaller
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from nanproof.core._telemetry import Courier
from nanproof.core.judge._parameters import is_compiled, is_dtensor, is_plain, local, moved, unwrap
from nanproof.core.support._hooks import Hook

Key: TypeAlias = tuple[nn.Module, str, str]
"""A buffer or a parameter: its owner, where the owner has it, and its name there."""
_SMALL = 1 << 20
"""Buffers up to this many bytes are always kept; larger masks and tables from the first step that writes them."""
_MOST = 1 << 28
"""Bytes of untrained parameters that are copied to find out which of them a forward writes; of more, only sums are compared."""
_CALM = 3
"""The step at which it is looked which buffers are written, and how many steps later the answer is read."""
_PATIENT = 4
"""Consecutive misses after which buffers are no longer compared as a whole, but one by one at every step."""
_values, _version = methodcaller("values"), attrgetter("_version")
_data_ptr: Callable[[Any], int] = Tensor.data_ptr
_kind, _stride = attrgetter("device", "dtype", "shape"), Tensor.stride
_TORCHS = frozenset(nn.Module().__dict__)
"""What every module has."""


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
    aliases: tuple[list[Tensor], list[Tensor]] | None = None
    """The buffers, as they are and as vectors, for as long as none of them is another tensor or lies elsewhere."""

    def live(self) -> list[Tensor]:
        """The buffers, detached."""
        return [_live(key) for key in self.keys] if self.aliases is None else self.aliases[0]

    def look(self) -> Tensor:
        """Their values now, end to end, whatever was known of them."""
        return _concatenate([_live(key) for key in self.keys])

    def read(self) -> Tensor:
        """Their values now, end to end."""
        return self.look() if self.aliases is None else torch.cat(self.aliases[1])

    def write(self, values: Tensor) -> None:
        """Write values into them that stand end to end."""
        parts = values.split([shape.numel() for shape in self.shapes])
        torch._foreach_copy_(self.live(), list(map(Tensor.view, parts, self.shapes)))

    def note(self) -> None:
        """Keep the buffers as they are now."""
        live = [_live(key) for key in self.keys]
        self.aliases = (live, [x.view(-1) for x in live]) if all(x.is_contiguous() for x in live) else None


class _Seen:
    """Every buffer as it was, compared with what is there now without a loop in Python."""

    def __init__(
        self, owners: list[nn.Module], kept: list[Key], untrained: list[Key], still: list[Tensor], quiet: list[Tensor]
    ) -> None:
        """`kept`: those whose values are kept. `still`: those that no forward writes. `quiet`: those of them whose address
        counts."""
        self._places = [m._buffers for m in owners]
        self._names = list(chain.from_iterable(self._places))
        self._all = list(chain.from_iterable(map(_values, self._places)))
        self._untrained = untrained
        held = [_held(key) for key in untrained]
        self._lookup = [getattr(owner, where) for owner, where, _ in untrained], [name for *_, name in untrained], held
        self._kept = [found for key in kept if (found := _held(key)) is not None]
        self._kinds, self._strides = list(map(_kind, self._kept)), list(map(_stride, self._kept))
        self._lie = [*self._kept, *quiet]
        self._addresses = list(map(_data_ptr, self._lie))
        self._still, self._versions = still, list(map(_version, still))

    def holds(self, untrained: list[Key]) -> bool:
        """Whether all of them are the same tensors, lie where they lay, and those that nobody writes were not written."""
        now = list(chain.from_iterable(map(_values, self._places)))
        dicts, names, held = self._lookup
        return (
            untrained is self._untrained
            and len(now) == len(self._all)
            and all(map(is_, now, self._all))
            and list(chain.from_iterable(self._places)) == self._names
            and all(map(is_, map(dict.get, dicts, names), held))
            and list(map(_version, self._still)) == self._versions
            and list(map(_data_ptr, self._lie)) == self._addresses
            and list(map(_kind, self._kept)) == self._kinds
            and list(map(_stride, self._kept)) == self._strides
        )


class BufferKeeper:
    """Keeps a copy of everything that the forward writes, and puts it back on a refused step.

    The copy is taken at the first training forward after a step (a hook on the model that is called), so that what other code
    does to buffers between steps is not undone.
    """

    def __init__(
        self, model: nn.Module, trained: Sequence[Tensor] | None = None, begin: Callable[[], None] | None = None
    ) -> None:
        """`trained`: what optimizers have; of frozen parameters those are kept that a forward writes. `begin`: the
        method that begins a step, where that is more than this one's."""
        self._model = unwrap(model)
        self._begin = None if begin is None else weakref.WeakMethod(begin)
        self._owners: list[nn.Module] = []
        self._trained = trained
        self._untrained = _Untrained([])
        self.attributes = Attributes([])
        self._flats: list[_Flat] = []
        self._layout: list[tuple[Key, Any]] = []
        self._replaced: dict[Key, Tensor | None] = {}
        """Buffers that this step's forward made anew in another shape, or for the first time, and what was there before."""
        self._known: set[Key] = set()
        """All buffers there were when the step began."""
        self._untouched: dict[Key, tuple[Tensor, int]] = {}
        """Large buffers, and their versions, that no forward has written yet."""
        self._quiet: dict[Key, tuple[Tensor, int, int, Tensor]] = {}
        """Buffers that the first steps did not write: as they are, how often they were written, where they lie, and a copy. As
        long as that is so, there is nothing to look at and nothing to put back."""
        self._begins = 0
        self._asked: tuple[Callable[[], list[float]], list[Key], int] | None = None
        """Which buffers a step has written: on its way from the device, to be read at this step."""
        self._in_step = False
        self._seen: _Seen | None = None
        """How all of them were when they were last looked at one by one."""
        self._misses = 0
        """How many times in a row that did not hold."""
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
        self._find_owners()
        self._untouched = {key: (buffer, buffer._version) for key, buffer in self._all() if not _always_kept(key, buffer)}
        self._replaced, self._quiet, self._begins, self._asked = {}, {}, 0, None
        self._misses = 0
        self._rebuild({})
        self._known = {*(key for key, _ in self._layout), *self._untouched, *self._quiet}

    def follow(self, trained: Sequence[Tensor]) -> None:
        """The model is made of other modules, or other parameters are trained. What is kept stays kept."""
        self._trained, self._misses = trained, 0
        kept = {key: part for flat in self._flats for key, part in _parts(flat)}
        self._find_owners()
        known = {key for key, _ in self._layout} | self._untouched.keys()
        self._untouched |= {k: (b, b._version) for k, b in self._all() if k not in known and not _always_kept(k, b)}
        self._rebuild(kept)

    def _find_owners(self) -> None:
        modules = list(self._model.modules())
        self._owners = [module for module in modules if module._buffers]
        self.attributes = self.attributes.of(modules)
        if self._trained is not None and not any(is_dtensor(p) for p in self._trained):
            others = {  # not those that require a gradient: they may be another optimizer's, with a verdict of its own
                id(p): (module, "_parameters", name)
                for module in modules
                for name, p in module._parameters.items()
                if p is not None and not p.requires_grad and _can_be_kept(p)
            }
            self._untrained = self._untrained.of(list(others.values()))

    def begin(self) -> None:
        """A step begins: keep what a forward writes, as it is now."""
        self._in_step = True
        self._begins += 1
        became_quiet = self._find_quiet()
        self._untrained.begin()
        self.attributes.save()
        if became_quiet or not self._unchanged():
            self._find_written()
            if self._layout != self._current_layout():
                self._rebuild({})
            self._known = {*(key for key, _ in self._layout), *self._untouched, *self._quiet}
            self._note_all()
        for flat in self._flats:
            flat.was = flat.read()

    def _unchanged(self) -> bool:
        """Whether all buffers are the tensors they were, and those that nobody writes still have not been written."""
        held = self._seen is not None and self._seen.holds(self._untrained.kept)
        self._misses = 0 if held else self._misses + 1
        if not held:
            self._seen = None
            for flat in self._flats:
                flat.aliases = None
        return held

    def _note_all(self) -> None:
        """Look at every buffer, so that later it takes one comparison to see that nothing changed. Not in a model that binds
        buffers anew at every step, nor for buffers that are sharded or made of others: those can change unseen."""
        self._seen = None
        for flat in self._flats:
            flat.aliases = None
        kept = [key for key, _ in self._layout]
        still = [buffer for buffer, _ in self._untouched.values()] + [buffer for buffer, *_ in self._quiet.values()]
        quiet = [buffer for buffer, *_ in self._quiet.values()]
        held = [x for key in kept if (x := _held(key)) is not None]
        if self._misses > _PATIENT or not all(map(is_plain, (*held, *still))):
            return
        self._seen = _Seen(self._owners, kept, self._untrained.kept, still, quiet)
        for flat in self._flats:
            flat.note()

    def look(self) -> Tensor | None:
        """After the forward: 0 if all is well, else 1 + the place of the first element that it made non-finite, for `name_at`.

        On the device; None where no buffer can go bad.
        """
        self._notice_changes()
        self._untrained.look()
        for flat in self._flats:
            flat.now = flat.read()
        self._ask_who_is_quiet()
        bad = [_worse(flat) for flat in self._floating()]
        if not bad:
            return None
        marks = bad[0] if len(bad) == 1 else torch.cat([moved(x, bad[0].device) for x in bad])
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
        bad = [(~torch.isfinite(flat.look()) & ~flat.meant).any() for flat in self._floating()]
        bad += [marks.any() for marks in self._worse_and_quiet().values()]
        return torch.stack([moved(x, bad[0].device) for x in bad]).any() if bad else None

    def broken(self) -> list[str]:
        """Names of the buffers that are non-finite now, without those that are infinite on purpose. Waits: for failures."""
        bad = []
        for flat in self._floating():
            marks = ~torch.isfinite(flat.look()) & ~flat.meant
            parts = marks.split([shape.numel() for shape in flat.shapes])
            bad += [self._name(key) for key, part in zip(flat.keys, parts, strict=True) if part.any()]
        return bad + [self._name(key) for key, marks in self._worse_and_quiet().items() if marks.any()]

    def _worse_and_quiet(self) -> dict[Key, Tensor]:
        quiet = {key: (_live(key), kept) for key, (*_, kept) in self._quiet.items() if _held(key) is not None}
        same = {key: pair for key, pair in quiet.items() if pair[0].shape == pair[1].shape and pair[0].is_floating_point()}
        return {key: ~torch.isfinite(now) & torch.isfinite(kept) for key, (now, kept) in same.items()}

    def _ask_who_is_quiet(self) -> None:
        """At the third step: which buffers has it written? The answer is read when the device has got that far."""
        if self._begins != _CALM or self._asked is not None or not self._flats:
            return
        keys = [key for flat in self._flats for key in flat.keys if key[1] == "_buffers"]
        flags = []
        for flat in self._flats:
            counts = [shape.numel() for shape in flat.shapes]
            pairs = zip(flat.keys, (flat.now != flat.was).split(counts), strict=True)
            flags += [written.any() for key, written in pairs if key[1] == "_buffers"]
        if keys:
            place = flags[0].device
            parcel = Courier(place).send(torch.stack([moved(flag, place) for flag in flags]).float())
            self._asked = parcel, keys, self._begins + _CALM

    def _find_quiet(self) -> bool:
        """Take in which buffers the first steps did not write. Return whether the answer has come."""
        if self._asked is None or self._begins < self._asked[2]:
            return False
        self._find_written()
        (parcel, keys, _), self._asked = self._asked, None
        there = {key for key, _ in self._layout}
        for key, written in zip(keys, parcel(), strict=True):
            buffer = _held(key)
            if not written and buffer is not None and key in there:
                self._quiet[key] = buffer, buffer._version, _address(buffer), _live(key).clone()
        return True

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
        self.attributes.restore()
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
            begin = self._begin() if self._begin is not None else None
            self.begin() if begin is None else begin()

    def _find_written(self) -> dict[Key, Tensor]:
        """Large buffers that were written after all are kept from now on. Returns those that were bound anew, as they were; of
        one that was written in place the old values are gone."""
        rebound = {}
        for key, (buffer, version) in list(self._untouched.items()):
            if _held(key) is not buffer:
                rebound[key] = buffer
                del self._untouched[key]
            elif buffer._version != version:
                del self._untouched[key]
        for key, (buffer, version, place, kept) in list(self._quiet.items()):
            now = _held(key)
            if now is not buffer or now._version != version or _address(now) != place:
                rebound[key] = kept
                del self._quiet[key]
        return rebound

    def _notice_changes(self) -> None:
        """Note which buffers this step's forward bound anew in another shape, or for the first time."""
        if self._unchanged():
            return
        self._replaced |= {key: old for key, old in self._find_written().items() if key not in self._replaced}
        layout = self._current_layout()
        if self._layout == layout:
            self._note_all()
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
        self._note_all()

    def _undo_changes(self) -> None:
        if not self._replaced:
            return
        kept = {key: part for flat in self._flats for key, part in _parts(flat)}
        for key, old in self._replaced.items():
            owner, where, name = key
            live = _held(key)
            if old is None or live is None or (live.shape, live.dtype, live.device) != (old.shape, old.dtype, old.device):
                getattr(owner, where)[name] = old
            else:
                _live(key).copy_(local(old))
        kept.update({key: old for key, old in self._replaced.items() if old is not None})
        self._replaced = {}
        self._rebuild(kept)

    def _all(self) -> Iterator[tuple[Key, Tensor]]:
        for module in self._owners:
            for name, buffer in module._buffers.items():
                if buffer is not None and _can_be_kept(buffer):
                    yield (module, "_buffers", name), buffer

    def _current_layout(self) -> list[tuple[Key, Any]]:
        kept = [(key, x) for key, x in self._all() if key not in self._untouched and key not in self._quiet]
        kept += [(key, x) for key in self._untrained.kept if (x := _held(key)) is not None]
        return [(key, (x.device, x.dtype, x.shape)) for key, x in kept]

    def _rebuild(self, kept: dict[Key, Tensor]) -> None:
        """Lay the kept values out anew; `kept` holds those that must survive, the rest are taken as they are now."""
        self._seen = None
        self._layout = self._current_layout()
        groups: dict[Any, list[Key]] = {}
        for key, (device, dtype, _) in self._layout:
            groups.setdefault((device, dtype), []).append(key)
        self._flats = []
        for (device, dtype), keys in groups.items():
            live = [_live(key) for key in keys]
            usable = []
            for key, now in zip(keys, live, strict=True):
                old = kept.get(key)
                same = old is not None and (old.shape, old.dtype, old.device) == (now.shape, dtype, device)
                usable.append(old if old is not None and same else now)
            was = _concatenate(usable)
            self._flats.append(_Flat(keys, [x.shape for x in live], was, _concatenate(live), torch.isinf(was)))

    def _name(self, key: Key) -> str:
        path = next((path for path, module in self._model.named_modules() if module is key[0]), "")
        return f"{path}.{key[2]}" if path else key[2]

    def _floating(self) -> list[_Flat]:
        return [flat for flat in self._flats if flat.now.is_floating_point()]


def _held(key: Key) -> Tensor | None:
    owner, where, name = key
    found: Tensor | None = getattr(owner, where).get(name)
    return found


def _live(key: Key) -> Tensor:
    found = _held(key)
    assert found is not None
    return local(found.detach())


class _Untrained:
    """Parameters that no optimizer trains, and which of them a forward writes. Most are never written, and copying a frozen
    model at every step would cost what training it does. So they are looked at now and then: at the first steps and then at
    every power of two; in between, by what torch counts, which misses writes into `.data`."""

    def __init__(self, keys: list[Key]) -> None:
        self.keys = keys
        self.kept: list[Key] = []
        """Those that are kept now: written ones, and all while it is found out."""
        self._written: set[Key] = set()
        self._begins = 0
        self._before: Any = None
        self._dicts, self._names = [getattr(owner, where) for owner, where, _ in keys], [name for *_, name in keys]
        self._hold(list(map(_held, keys)))
        self._counts = self._counted()
        self._said: tuple[Callable[[], list[float]], int] | None = None
        self._small = sum(_live(key).nbytes for key in keys) <= _MOST

    def of(self, keys: list[Key]) -> _Untrained:
        """The same for other parameters, looking anew; those that are known to be written stay so."""
        if [(m, n) for m, _, n in keys] == [(m, n) for m, _, n in self.keys]:
            return self
        other = _Untrained(keys)
        other._written = self._written & set(keys)
        other.kept = [key for key in keys if key in other._written]
        return other

    def begin(self) -> None:
        if not self.keys:
            return
        count, self._begins = self._begins, self._begins + 1
        if self._said is not None and (count >= self._said[1] or _live(self.keys[0]).device.type == "cpu"):
            flags, self._said = self._said[0](), None
            self._note({key for key, flag in zip(self.keys, flags, strict=True) if flag})
        if count & (count - 1) == 0:
            if self._small:
                self.kept = self.keys
            self._before = [_live(key).clone() if self._small else _sum(_live(key)) for key in self.keys]
        self._counts = self._counted()

    def look(self) -> None:
        """After the forward."""
        if not self.keys:
            return
        now = self._counted()
        if now != self._counts:
            before, after = zip(*self._counts, strict=True), zip(*now, strict=True)
            self._note({key for key, a, b in zip(self.keys, before, after, strict=True) if a != b})
            self._counts = now
        before, self._before = self._before, None
        if before is not None:
            live = [_live(key) if self._small else _sum(_live(key)) for key in self.keys]
            pairs = zip(live, before, strict=True)
            flags = [(a != b).any() if a.shape == b.shape else torch.ones((), dtype=torch.bool) for a, b in pairs]
            first = flags[0].device
            self._said = Courier(first).send(torch.stack([f.to(first) for f in flags]).float()), self._begins + 3

    def _hold(self, parameters: list[Any]) -> None:
        self._held = parameters
        self._plain = all(p is not None and is_plain(p) and not p.is_inference() for p in parameters)

    def _counted(self) -> list[list[int]]:
        """How often each was written, and where it lies."""
        now = list(map(dict.get, self._dicts, self._names))
        if not all(map(is_, now, self._held)):
            self._hold(now)  # replaced ones are let go
        if self._plain:
            return [list(map(_version, now)), list(map(_data_ptr, now))]
        there = [p for p in now if p is not None]
        return [[0 if p.is_inference() else p._version for p in there], [_address(p) for p in there]]

    def _note(self, written: set[Key]) -> None:
        self._written |= written
        if self._said is None:
            self.kept = [key for key in self.keys if key in self._written]


def _address(p: Tensor) -> int:
    return local(p.detach()).data_ptr()


def _sum(x: Tensor) -> Tensor:
    """A number that changes with the bits of a tensor."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.view(kinds[x.element_size()]).sum(dtype=torch.int64) if x.element_size() in kinds else x.abs().sum()


class Attributes:
    """Tensors that modules keep in plain attributes, as a step finds them."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        self._saves = 0
        self._known: list[tuple[dict[str, Any], str]] = []
        self._in_place: set[tuple[int, str]] = set()
        """Those that something wrote into."""
        self._kept: list[tuple[dict[str, Any], str, Tensor, int, Tensor | None]] = []
        self._others: list[tuple[dict[str, Any], dict[str, Any]]] | None = None
        """What else the modules had, where they were all looked at."""

    def of(self, modules: list[nn.Module]) -> Attributes:
        """The same for other modules."""
        return self if self._modules == modules else Attributes(modules)

    def save(self) -> None:
        """Note them as they are now. New ones are looked for at the first steps and then at every power of two."""
        count, self._saves = self._saves, self._saves + 1
        look = count & (count - 1) == 0
        for place, name, tensor, version, _ in self._kept:
            if place.get(name) is tensor and tensor._version != version:
                self._in_place.add((id(place), name))
        self._others = None
        if look:
            own = [(m.__dict__, {k: v for k, v in m.__dict__.items() if k not in _TORCHS}) for m in self._modules]
            self._known = [(place, k) for place, values in own for k, v in values.items() if _is_state(v)]
            self._others = [(place, {k: v for k, v in values.items() if not isinstance(v, Tensor)}) for place, values in own]
        self._kept = []
        for place, name in self._known:
            now: Any = place.get(name)
            if _is_state(now):
                small = now.nbytes <= _SMALL and (look or (id(place), name) in self._in_place)
                self._kept.append((place, name, now, now._version, now.detach().clone() if small else None))

    def taken(self) -> Callable[[], None]:
        """How to put back what was noted last."""
        kept, others = self._kept, self._others

        def put_back() -> None:
            names = {(id(place), name) for place, name, *_ in kept}
            for place, values in others or ():
                for name in [k for k, v in place.items() if _is_state(v) and (id(place), k) not in names]:
                    if name in values:
                        place[name] = values[name]
                    elif name not in _TORCHS:
                        del place[name]
            for place, name, tensor, version, copied in kept:
                place[name] = tensor
                if copied is not None and tensor._version != version:
                    with torch.no_grad():
                        tensor.copy_(copied)

        return put_back

    def restore(self) -> None:
        self.taken()()


def _is_state(value: Any) -> bool:
    """Not what belongs to a graph: that is an activation, which holding on to would keep a whole step in memory."""
    if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
        return False
    return value.grad_fn is None and not value.is_inference()


def _always_kept(key: Key, buffer: Tensor) -> bool:
    """Small buffers, and those that are part of a model's state and no mask: codebooks, running statistics."""
    owner, _, name = key
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
