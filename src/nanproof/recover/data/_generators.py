"""The random numbers that the order of the data comes from: found, saved as plain data, put back.

A sampler draws from a generator of its own, from the loader's, or from the global ones. With their states at the start of an
epoch, the same order can be made again, also in another process.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Sampler

from nanproof.core.support._context import RandomState
from nanproof.explain.bundle._facts import random_in, random_out
from nanproof.explain.bundle._restore import usable

Plain: TypeAlias = dict[str, Any]
"""Numbers, texts, lists, dicts and tensors: what `torch.load(weights_only=True)` takes."""


@dataclass(frozen=True)
class Moment:
    """The states of all generators at one moment, and the epoch that samplers and datasets were told."""

    common: RandomState
    own: dict[str, Any]
    """By where the generator lies: "loader.generator", "loader.sampler.generator"."""
    epochs: dict[str, int]

    @cached_property
    def plain(self) -> Plain:
        return {"common": random_out(self.common), "own": self.own, "epochs": self.epochs}

    def same(self, other: Moment) -> bool:
        own = self.own.keys() == other.own.keys() and all(_same(state, other.own[name]) for name, state in self.own.items())
        return own and self.epochs == other.epochs and not self.common.moved_since(other.common)

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Moment:
        return cls(usable(random_in(plain["common"])), dict(plain["own"]), dict(plain["epochs"]))


class Generators:
    """Those that a loader, its samplers and its dataset hold, and the global ones."""

    def __init__(self, **roots: Any) -> None:
        self._roots = roots

    def now(self, earlier: Moment | None = None) -> Moment:
        """Nothing new if nothing moved, so that it is saved once."""
        moment = Moment(RandomState.now(()), self.own(), self.epochs())
        return earlier if earlier is not None and moment.same(earlier) else moment

    def epochs(self) -> dict[str, int]:
        return {name: epoch for name, holder in self._holders() if (epoch := _told(holder)) is not None}

    def own(self) -> dict[str, Any]:
        return {name: _get(generator) for name, generator in _held(self._holders())}

    def put(self, moment: Moment) -> None:
        moment.common.restore()
        self.put_own(moment.own)
        self.put_epochs(moment.epochs)

    def put_epochs(self, epochs: Mapping[str, int]) -> None:
        for name, holder in self._holders():
            epoch = epochs.get(name)
            if epoch is not None and _told(holder) not in (None, epoch):
                if callable(tell := getattr(holder, "set_epoch", None)):
                    tell(epoch)
                else:
                    with suppress(AttributeError):  # it may be worked out from something else
                        holder.epoch = epoch

    def put_own(self, states: Mapping[str, Any]) -> None:
        for name, generator in _held(self._holders()):
            if name in states:
                _set(generator, states[name])

    def _holders(self) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        todo = list(self._roots.items())
        while todo:
            name, holder = todo.pop(0)
            if id(holder) in seen or holder is None:
                continue
            seen.add(id(holder))
            yield name, holder
            for attribute, value in getattr(holder, "__dict__", {}).items():
                if isinstance(value, Sampler) or attribute in ("sampler", "batch_sampler"):
                    todo.append((f"{name}.{attribute}", value))


@contextmanager
def common_kept() -> Iterator[None]:
    """The global generators afterwards give the numbers they would have given before."""
    before = RandomState.now(())
    try:
        yield
    finally:
        before.restore()


def _told(holder: Any) -> int | None:
    try:
        epoch = holder.epoch
    except Exception:  # somebody else's property
        return None
    return epoch if type(epoch) is int else None


def _held(holders: Any) -> Iterator[tuple[str, Any]]:
    for name, holder in holders:
        for attribute, value in getattr(holder, "__dict__", {}).items():
            if _is_generator(value):
                yield f"{name}.{attribute}", value


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def _is_generator(value: Any) -> bool:
    if isinstance(value, torch.Generator):
        return value is not torch.default_generator
    numpy_random = sys.modules.get("numpy.random")
    return isinstance(value, random.Random) or (numpy_random is not None and isinstance(value, numpy_random.Generator))


def _get(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return random_out(RandomState({"python": generator.getstate()}))["python"]
    return _without_arrays(generator.bit_generator.state)


def _set(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        generator.setstate(random_in({"python": state}).states["python"])
    else:
        generator.bit_generator.state = _with_arrays(state)


def _without_arrays(state: Any) -> Any:
    """NumPy keeps its states in nested dicts of numbers and arrays."""
    if isinstance(state, dict):
        return {key: _without_arrays(value) for key, value in state.items()}
    if hasattr(state, "tobytes"):
        return {"dtype": str(state.dtype), "bytes": torch.frombuffer(bytearray(state.tobytes()), dtype=torch.uint8)}
    return state


def _with_arrays(state: Any) -> Any:
    if isinstance(state, dict) and isinstance(state.get("bytes"), Tensor):
        return sys.modules["numpy"].frombuffer(bytes(state["bytes"].tolist()), dtype=state["dtype"])
    return {key: _with_arrays(value) for key, value in state.items()} if isinstance(state, dict) else state


@dataclass(slots=True)
class Start:
    """The moments at which the order of an epoch is decided. A loader draws a seed for its workers between them, but not
    always, hence three."""

    opened: Moment
    """Before the loader was asked for its iterator."""
    at_iter: Moment | None = None
    """Before the sampler was asked for its iterator."""
    at_first: Moment | None = None
    """Before the sampler was asked for its first batch."""

    def out(self) -> Plain:
        return {
            "opened": self.opened.plain,
            "at_iter": None if self.at_iter is None else self.at_iter.plain,
            "at_first": None if self.at_first is None else self.at_first.plain,
        }

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Start:
        opened = Moment.read(plain["opened"])
        later = (None if plain[name] is None else Moment.read(plain[name]) for name in ("at_iter", "at_first"))
        return cls(opened, *later)
