"""What a step depends on besides its batch: random numbers, the schedule, the mode it is called in. Saved before a step, so that
a refused one leaves no trace and a held one can be run again as it was."""

from __future__ import annotations

import copy
import ctypes
import random
import struct
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from operator import attrgetter
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_training = attrgetter("training")


class Rehearsal:
    """Steps that are run again only to look at them. Nothing of them is training, so nobody is to count them. One flag for all
    threads: autograd runs hooks in threads of its own."""

    def __init__(self) -> None:
        self._depth = 0

    def __bool__(self) -> bool:
        return self._depth > 0

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1


rehearsal = Rehearsal()


@dataclass(frozen=True, slots=True)
class RandomState:
    """States of torch's generators (CPU and the devices in use), Python's, and NumPy's if it is loaded. None of these reads
    waits for a device."""

    states: dict[str, Any]
    """By generator: "python", "numpy", "cpu", "cuda:0". Python's is a tuple, NumPy's a `NumpyState`, the others are tensors."""

    @classmethod
    def now(cls, devices: Iterable[torch.device]) -> RandomState:
        states: dict[str, Any] = {"python": python_state(), "cpu": torch.default_generator.get_state()}
        if "numpy" in sys.modules:
            states["numpy"] = NumpyState.now()
        for device in devices:
            states[str(device)] = torch.get_device_module(device).get_rng_state(device)
        return cls(states)

    def restore(self) -> None:
        for name, state in self.states.items():
            if name == "python":
                random.setstate(state)
            elif name == "numpy":
                state.restore()
            elif name == "cpu":
                torch.set_rng_state(state)
            else:
                device = torch.device(name)
                torch.get_device_module(device).set_rng_state(state, device)

    def moved_since(self, earlier: RandomState) -> set[str]:
        """The generators that gave out numbers in between."""
        return {name for name, state in self.states.items() if not _same(state, earlier.states.get(name))}

    def only(self, names: set[str]) -> RandomState:
        return RandomState({name: state for name, state in self.states.items() if name in names})


_PYTHON = id(random._inst) + object.__basicsize__
"""Where CPython's generator keeps its position and its 624 numbers."""
_python_seen: tuple[bytes, Any, Any] | None = None


def python_state() -> Any:
    """`random.getstate()`, which takes nine microseconds: it is asked only if the generator moved, which a look at its 2,500
    bytes of memory tells in one."""
    global _python_seen
    spare = getattr(random._inst, "gauss_next", None)
    if _can_look and _python_seen is not None and _python_seen[0] == _python_memory.raw and _python_seen[1] == spare:
        return _python_seen[2]
    state = random.getstate()
    if _can_look:
        _python_seen = _python_memory.raw, spare, state
    return state


def _looks_right() -> bool:
    """Whether the memory is laid out as in the CPythons that this was written for."""
    if sys.implementation.name != "cpython" or random._inst.__sizeof__() < 2500:
        return False
    _, numbers, _ = random.getstate()
    position, *others = struct.unpack("=I624I", ctypes.string_at(_PYTHON, 2500))
    return bool(tuple(others) == numbers[:-1] and position == numbers[-1])


_can_look = _looks_right()
_python_memory: Any = (ctypes.c_char * 2500).from_address(_PYTHON) if _can_look else None


@dataclass(frozen=True, slots=True)
class NumpyState:
    """The state of NumPy's global generator. Reading it takes 30 microseconds, so it is read only if it moved, which a look at
    its 2,500 bytes of memory tells in one."""

    kind: str
    key: bytes
    position: int
    has_gauss: int
    gauss: float

    @classmethod
    def now(cls) -> NumpyState:
        global _numpy_seen, _numpy_memory
        mtrand: Any = sys.modules.get("numpy.random.mtrand") or import_module("numpy.random.mtrand")
        generator = mtrand._rand._bit_generator
        seen = None
        if type(generator).__name__ == "MT19937":
            if _numpy_memory is None or _numpy_memory[0] is not generator:
                _numpy_memory = generator, (ctypes.c_char * 2500).from_address(generator.ctypes.state_address)
            seen = _numpy_memory[1].raw
            # A second normal number that is kept in reserve lies elsewhere: with one, the memory does not tell.
            if _numpy_seen is not None and _numpy_seen[0] == seen and not _numpy_seen[1].has_gauss:
                return _numpy_seen[1]
        from numpy.random import get_state

        full: Any = get_state(legacy=True)  # noqa: NPY002
        kind, key, position, has_gauss, gauss = full
        state = cls(str(kind), key.tobytes(), int(position), int(has_gauss), float(gauss))
        _numpy_seen = (seen, state) if seen is not None else None
        return state

    def restore(self) -> None:
        from numpy import frombuffer, uint32
        from numpy.random import set_state

        set_state(  # noqa: NPY002
            (self.kind, frombuffer(self.key, dtype=uint32), self.position, self.has_gauss, self.gauss)
        )


_numpy_seen: tuple[bytes, NumpyState] | None = None
_numpy_memory: tuple[Any, Any] | None = None
"""The generator, and where it keeps its numbers: alive as long as the generator is."""


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


Groups: TypeAlias = list[dict[str, Any]]
"""Every parameter group's settings (learning rate, betas, ...)."""


def settings(optimizer: Optimizer) -> Groups:
    return [{k: _clone(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]


def change_settings(optimizer: Optimizer, groups: Groups) -> None:
    """Set what `groups` holds; a tensor (of a learning rate) in place. Groups added since stay as they are."""
    for group, saved in zip(optimizer.param_groups, groups, strict=False):
        for key, value in saved.items():
            if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                group[key].copy_(value)
            else:
                group[key] = value


def changed_settings(before: Groups, after: Groups) -> Groups:
    """What became different: what the user's own code set between two steps."""
    return [{k: v for k, v in new.items() if not _same(v, old.get(k))} for old, new in zip(before, after, strict=False)]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Settings, and the state of the scheduler that sets them. Its `load_state_dict` does not put the learning rate back, hence
    both."""

    groups: Groups
    scheduler: Any

    @classmethod
    def now(cls, optimizer: Optimizer, scheduler: Any) -> Schedule:
        return cls(settings(optimizer), None if scheduler is None else copy.deepcopy(scheduler.state_dict()))

    def restore(self, optimizer: Optimizer, scheduler: Any) -> None:
        if scheduler is not None:
            scheduler.load_state_dict(copy.deepcopy(self.scheduler))
        change_settings(optimizer, self.groups)


class Schedulers:
    """The schedulers of several optimizers, as one."""

    def __init__(self, schedulers: Sequence[Any]) -> None:
        self.schedulers = tuple(schedulers)

    def step(self) -> None:
        for scheduler in self.schedulers:
            scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        return {str(i): scheduler.state_dict() for i, scheduler in enumerate(self.schedulers)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for i, scheduler in enumerate(self.schedulers):
            scheduler.load_state_dict(state[str(i)])

    @property
    def last_epoch(self) -> Any:
        return getattr(self.schedulers[0], "last_epoch", None)


@dataclass(frozen=True, slots=True)
class Mode:
    """How a step was called: which modules were training, and under which autocast."""

    training: list[bool]
    autocast: bool
    autocast_dtype: torch.dtype

    @classmethod
    def now(cls, modules: list[nn.Module], device: torch.device) -> Mode:
        kind = device.type
        return cls(list(map(_training, modules)), torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))

    @contextmanager
    def again(self, modules: list[nn.Module], device: torch.device) -> Iterator[None]:
        before = [m.training for m in modules]
        for module, training in zip(modules, self.training, strict=True):
            module.training = training
        try:
            with torch.enable_grad(), torch.autocast(device.type, dtype=self.autocast_dtype, enabled=self.autocast):
                yield
        finally:
            for module, training in zip(modules, before, strict=True):
                module.training = training


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def learning_rates(optimizer: Optimizer) -> tuple[float | Tensor, ...]:
    """One a group; a tensor is cloned, not read."""
    return tuple(_clone(group.get("lr", 0.0)) for group in optimizer.param_groups)
