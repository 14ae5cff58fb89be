"""Snapshots: good states of a run in memory, to go back to within seconds.

On CUDA a snapshot waits for nothing: the copies run on a stream of their own through pinned memory, beside the next forward and
backward, and only the next optimizer step waits for them, on the device. Whether every number in it is finite is found out on
the device as well and read later, together with the verdicts of the steps it follows; until then the snapshot is not used.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count, groupby
from typing import Any

import torch
from torch import Tensor

from nanproof.core._telemetry import Courier
from nanproof.core.judge._parameters import is_dtensor, local
from nanproof.core.support._inner import nonfinite, numbers, rewrapped
from nanproof.core.support._ranks import Ranks
from nanproof.recover.state._shared import SharedBlock, part
from nanproof.recover.state._state import RunState

log = logging.getLogger("nanproof")

_ALIGN = 256
_numbers = count()


@dataclass(slots=True, eq=False)
class Snapshot:
    """A state of the run: what the world was like when `step` was the next to be taken."""

    step: int
    arena: Arena
    frozen: dict[str, Arena]
    """Of tensors that are not in that memory: where they are."""
    copies: dict[str, Tensor]
    """This rank's part of every tensor."""
    sharded: dict[str, Any]
    """The tensors that are sharded, for how they are."""
    host: dict[str, Any]
    finite: Callable[[], bool]
    """Whether every weight, buffer and moment is finite, on every rank. Waits, if it has not been found out yet."""
    own: frozenset[str] = frozenset()
    """Tensors that every rank may have its own of, though they are not sharded: buffers."""
    done: list[Any] = field(default_factory=list)
    """Events behind the copies."""
    in_place: bool = False
    """Copied straight from the living state, not from a copy on the device."""
    confirmed: bool = False
    """The steps it follows were all accepted, and it is finite."""
    saving: bool = False
    """On its way to the disk."""
    released: bool = False
    """Its memory is another's."""

    def wait(self) -> None:
        """Until the copies are there. For the host; a device stream waits with `order_after`."""
        for event in self.done:
            event.synchronize()

    def order_after(self) -> None:
        """What the device does from now on comes after the copies, where they are made from the living state."""
        for event in self.done if self.in_place else ():
            torch.cuda.current_stream(event.device).wait_event(event)

    def tensors(self) -> dict[str, Tensor]:
        """The copies as whole tensors, sharded ones as such."""
        return {n: rewrapped(t, self.sharded[n]) if n in self.sharded else t for n, t in self.copies.items()}


class Arena:
    """The memory of a snapshot: one block for each device that tensors come from, in host memory or on that device. Taken once,
    used again. Blocks of one plan are cut alike, wherever they lie."""

    def __init__(self, plan: Plan, on_device: bool, shared: bool = False, pinned: bool = True) -> None:
        self.plan, self.number = plan, next(_numbers)
        self.blocks: dict[torch.device, Tensor] = {}
        self.shared: dict[torch.device, SharedBlock] = {}
        """The same blocks, where another process can be given them."""
        for device, size in plan.sizes.items():
            if shared and not (on_device and device.type != "cpu"):
                with suppress(OSError):
                    self.shared[device] = SharedBlock(size)
            if device in self.shared:
                self.blocks[device] = self.shared[device].bytes
            else:  # zeros: what lies between the tensors is looked at with them
                self.blocks[device] = torch.zeros(size, dtype=torch.uint8, device=device if on_device else "cpu")
            if device.type == "cuda" and not on_device and pinned:
                _pin(self.blocks[device])
        self.views: dict[str, Tensor] = {}
        self.starts: dict[str, int] = {}
        used = dict.fromkeys(self.blocks, 0)
        for name, (device, dtype, shape) in plan.items.items():
            start = self.starts[name] = used[device]
            used[device] = start + _round_up(math.prod(shape) * dtype.itemsize)
            self.views[name] = part(self.blocks[device], start, dtype, shape)

    @property
    def is_shared(self) -> bool:
        """Whether another process can be given all of it."""
        return self.shared.keys() == self.blocks.keys()

    def stretches(self, names: Set[str]) -> Iterator[Tensor]:
        """The floating-point numbers of these tensors in host memory. Neighbours of one kind are one tensor: looking at each by
        itself takes longer than a step, where a model has hundreds of small ones."""
        kinds = groupby(self.plan.items.items(), lambda item: (item[0] in names, *item[1][:2]))
        for (asked, device, dtype), items in kinds:
            if asked and (dtype.is_floating_point or dtype.is_complex):
                inside = list(items)
                last, (_, _, shape) = inside[-1]
                start, end = self.starts[inside[0][0]], self.starts[last] + _round_up(math.prod(shape) * dtype.itemsize)
                yield from numbers(self.blocks[device][start:end].view(dtype))


@dataclass(frozen=True)
class Plan:
    """What a snapshot has to hold."""

    items: dict[str, tuple[torch.device, torch.dtype, tuple[int, ...]]]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Plan:
        return cls({name: (t.device, t.dtype, tuple(t.shape)) for name, t in tensors.items()})

    @property
    def bytes(self) -> int:
        return sum(self.sizes.values())

    @cached_property
    def sizes(self) -> dict[torch.device, int]:
        """Bytes that come from each device."""
        found: dict[torch.device, int] = {}
        for device, dtype, shape in self.items.values():
            found[device] = found.get(device, 0) + _round_up(math.prod(shape) * dtype.itemsize)
        return found

    def places(self, on_device: bool) -> dict[str, int]:
        """Bytes that a copy takes in each place."""
        found: dict[str, int] = {}
        for device, size in self.sizes.items():
            place = str(device) if on_device else "cpu"
            found[place] = found.get(place, 0) + size
        return found


class Snapshots:
    """Takes snapshots, keeps the last two that are good, and says what memory that takes before it takes it."""

    KEPT = 2

    def __init__(self, state: RunState, ranks: Ranks, device: torch.device, on_device: bool, shared: bool = False) -> None:
        """`shared`: in memory that another process can be given."""
        self._state, self._ranks, self._on_device, self._shared = state, ranks, on_device, shared
        self._courier = Courier(device)
        self._free: list[Arena] = []
        self._lock = threading.Lock()
        self._frozen: dict[str, tuple[Tensor, tuple[int, int], Arena]] = {}
        self._streams: dict[torch.device, Any] = {}
        self._staged: tuple[Plan, Arena | None] | None = None
        self._said: int | None = None
        self.kept: list[Snapshot] = []
        """Oldest first; the last ones may not be confirmed yet."""

    def take(self, step: int, host: dict[str, Any]) -> Snapshot | None:
        """Copy the state as it is now. None, with a warning, where there is not enough memory."""
        live = self._state.tensors()
        kinds = set(map(type, live.values())) - {Tensor, torch.nn.Parameter}
        sharded = {name: t for name, t in live.items() if is_dtensor(t)} if kinds else {}
        parts = {name: local(t) for name, t in live.items()} if sharded else live
        frozen = self._keep_frozen(parts)
        moving = {name: t for name, t in parts.items() if name not in frozen} if frozen else parts
        arena = self._room(Plan.of(moving))
        if arena is None:
            return None
        buffers = self._state.buffer_names()
        copies = {**arena.views, **{name: place.views[name] for name, place in frozen.items()}}
        snapshot = Snapshot(step, arena, frozen, copies, sharded, host, bool, frozenset(buffers))
        asked = parts.keys() - buffers - {"guard.stats"}
        places = {device.type for place in (arena, *frozen.values()) for device in place.plan.sizes}
        on_host = not self._ranks.together and places <= {"cpu"}
        if not on_host:
            snapshot.finite = self._look([number for name in parts if name in asked for number in numbers(parts[name])])
        self._copy(snapshot, moving)
        if on_host:
            found = self._is_finite(snapshot, asked)
            snapshot.finite = lambda: found
        return snapshot

    def keep(self, snapshot: Snapshot) -> None:
        """Among those to go back to; the oldest makes room once there are enough good ones."""
        self.kept.append(snapshot)
        good = [s for s in self.kept if s.confirmed]
        for old in good[: -self.KEPT]:
            self.kept.remove(old)
            self.release(old)

    def release(self, snapshot: Snapshot) -> None:
        """Its memory may be used again. Training and the thread that writes both come here, each when it is done with it: the
        second time, the memory may be another snapshot's."""
        with self._lock:
            if snapshot.released or snapshot.saving or snapshot in self.kept:
                return
            snapshot.released = True
        snapshot.wait()
        self._free.append(snapshot.arena)

    def drop(self, which: Callable[[Snapshot], bool]) -> None:
        for snapshot in [s for s in self.kept if which(s)]:
            self.kept.remove(snapshot)
            self.release(snapshot)

    def close(self) -> None:
        self.kept.clear()
        self._free.clear()
        self._staged = None
        self._frozen.clear()

    def _is_finite(self, snapshot: Snapshot, asked: Set[str]) -> bool:
        """Whether weights, moments and buffers are finite, from the copy: it lies in one piece."""
        bad = self._state.bad_buffers()
        if bad is not None and bool(bad):
            return False
        places = [snapshot.arena, *dict.fromkeys(snapshot.frozen.values())]
        names = [asked - snapshot.frozen.keys(), *(asked & {n for n, a in snapshot.frozen.items() if a is p} for p in places[1:])]
        return not nonfinite(("", t) for place, some in zip(places, names, strict=True) for t in place.stretches(some))

    def _look(self, asked: Sequence[Tensor]) -> Callable[[], bool]:
        """Whether weights, moments and buffers are finite: asked on the device now, read later."""
        bad = self._state.bad_buffers()
        device = asked[0].device if asked else torch.device("cpu")
        flags = [bad.to(device, non_blocking=True)] if bad is not None else []
        for group in _by_place(asked):
            largest = torch.stack(torch._foreach_norm(group, torch.inf))
            flags.append((~torch.isfinite(largest)).any().to(device, non_blocking=True))
        flag = torch.stack(flags).any() if flags else torch.zeros((), dtype=torch.bool)
        parcel = self._courier.send(self._ranks.any_rank(flag).float().reshape(1))
        answer: list[bool] = []

        def finite() -> bool:
            if not answer:
                answer.append(parcel()[0] == 0)
            return answer[0]

        return finite

    def _copy(self, snapshot: Snapshot, moving: Mapping[str, Tensor]) -> None:
        arena = snapshot.arena
        for device in arena.plan.sizes:
            names = [name for name, t in moving.items() if t.device == device] if len(arena.blocks) > 1 else list(moving)
            if device.type != "cuda" or self._on_device:
                torch._foreach_copy_([arena.views[n] for n in names], [moving[n] for n in names])
                continue
            stream = self._streams.setdefault(device, torch.cuda.Stream(device))
            aside = self._aside(arena.plan, device)
            if aside is not None:
                # One fast copy on the device; the slow way to the host is then nobody's business but the copy engine's.
                torch.cuda.current_stream(device).wait_stream(stream)
                torch._foreach_copy_([aside.views[n] for n in names], [moving[n] for n in names])
                pairs = [(arena.blocks[device], aside.blocks[device])]
            else:
                # No room for that: the next optimizer step waits. What the next forward writes cannot.
                fickle = self._state.written_by_the_forward() | {n for n in names if n.startswith(("scaler.", "guard."))}
                pairs = [(arena.views[n], moving[n].clone() if n in fickle else moving[n]) for n in names]
                snapshot.in_place = True
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for place, source in pairs:
                    place.copy_(source, non_blocking=True)
                    source.record_stream(stream)  # its memory is not used again before this is done
                event = torch.cuda.Event()
                event.record()
            snapshot.done.append(event)

    def _aside(self, plan: Plan, device: torch.device) -> Arena | None:
        """Memory on the device for a copy on its way to the host, where there is plenty; decided once."""
        if self._staged is None or self._staged[0] != plan:
            self._staged = (plan, None)
            taken = {d: size for d, size in plan.sizes.items() if d.type == "cuda"}
            if all(size < torch.cuda.mem_get_info(d)[0] / 4 for d, size in taken.items()):
                places = " + ".join(f"{_size(size)} on {d}" for d, size in taken.items())
                log.info("nanproof: %s more while a copy is on its way to the host", places)
                self._staged = (plan, Arena(plan, on_device=True))
        return self._staged[1]

    def _keep_frozen(self, parts: Mapping[str, Tensor]) -> dict[str, Arena]:
        """Where the copies of what nothing trains are: made once, and again if it was written. Only where that is most of the
        model, as under adapters: a teacher that follows its student is written through `.data` too, which nothing counts."""
        if not (frozen := self._state.frozen()):
            return {}
        size = sum(parts[name].nbytes for name in frozen)
        if 2 * size < sum(t.nbytes for name, t in parts.items() if name.startswith("model.")):
            return {}
        written = {name: (p._version, parts[name].data_ptr()) for name, p in frozen.items()}
        wanted = {}
        for name, p in frozen.items():
            known = self._frozen.get(name)
            same = known is not None and known[0] is p and known[1] == written[name]
            if same and known is not None and parts[name].device.type == "cpu":
                same = torch.equal(known[2].views[name], parts[name])
            if not same:
                wanted[name] = parts[name].detach()
        if wanted:  # never into the old place: an older copy of the state has that
            arena = Arena(Plan.of(wanted), self._on_device, self._shared, pinned=False)
            for name, tensor in wanted.items():
                arena.views[name].copy_(tensor)
                self._frozen[name] = (frozen[name], written[name], arena)
        return {name: self._frozen[name][2] for name in frozen}

    def _room(self, plan: Plan) -> Arena | None:
        while self._free:
            arena = self._free.pop()
            if arena.plan == plan:  # else of another shape: of no use any more
                return arena
        if not self._fits(plan):
            return None
        return Arena(plan, self._on_device, self._shared)

    def _fits(self, plan: Plan) -> bool:
        """Say what a snapshot takes before it is taken; not at all if that is more than there is."""
        sizes = plan.places(self._on_device)
        if self._said != plan.bytes:
            self._said = plan.bytes
            places = " + ".join(f"{_size(size)} on {place}" for place, size in sizes.items())
            log.info("nanproof: a copy of the run's state takes %s; up to %d are held at a time", places, self.KEPT + 1)
        for place, size in sizes.items():
            free = _free_memory(place)
            if free is not None and size > 0.9 * free:
                log.warning(
                    "nanproof: no copy of the run's state is taken: it needs %s on %s, %s are free",
                    _size(size),
                    place,
                    _size(free),
                )
                return False
        return True


def _by_place(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    groups: dict[Any, list[Tensor]] = {}
    for t in tensors:
        groups.setdefault((t.device, t.dtype), []).append(t)
    return list(groups.values())


def _size(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"


def _round_up(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def _free_memory(place: str) -> int | None:
    """Bytes that can be had; None where nobody knows."""
    if place.startswith("cuda"):
        return int(torch.cuda.mem_get_info(torch.device(place))[0])
    try:
        with open("/proc/meminfo") as file:
            facts = dict(line.split(":", 1) for line in file)
        return int(facts["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return None


def _pin(block: Tensor) -> None:
    """Lock a block in memory so that copies from a device need not wait. torch's own pinned blocks are rounded up to a power of
    two, which for gigabytes is too much. Where the system says no, copies still work, only slower."""
    runtime = torch.cuda.cudart()
    address, size = block.data_ptr(), block.numel()
    if size and int(runtime.cudaHostRegister(address, size, 0)) == 0:
        weakref.finalize(block.untyped_storage(), _unpin, address, os.getpid())


def _unpin(address: int, pid: int) -> None:
    if os.getpid() == pid:
        torch.cuda.cudart().cudaHostUnregister(address)
