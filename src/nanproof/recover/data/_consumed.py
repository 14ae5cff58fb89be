"""Feeds of data that can only be consumed: lists and other iterables of batches, iterators, loaders with a state of their own.

What their batches are made of is not known, so nothing is left out of them; batches can be stepped over.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from typing import Any

from torch.utils.data import DataLoader

from nanproof._errors import UsageError
from nanproof.recover.data._feeds import Feed, Given, Opening, Source, shut_down
from nanproof.recover.data._generators import Generators, Plain, Start, common_kept

log = logging.getLogger("nanproof")


class PlainSource(Source):
    """Anything that can be iterated over again: it is skipped by consuming it. What its batches are made of is not known."""

    kind = "plain"

    def __init__(self, data: Any) -> None:
        self.data = data
        self.generators = Generators(loader=data)

    def open(self, opening: Opening) -> PlainFeed:
        return PlainFeed(self, opening)


class PlainFeed(Feed):
    def __init__(self, source: PlainSource, opening: Opening) -> None:
        again = opening.start
        self._data, self._stepped_over = source.data, opening.stepped_over
        with opening.common() if again is not None else nullcontext():
            if again is not None:
                source.generators.put(again.opened)
            self.start = again or Start(source.generators.now())
            self._batches: Iterator[Any] | None = iter(source.data)
            self._next = 0
            while self._next < opening.batch:
                next(self._batches, None)
                self._next += 1
        if again is not None and opening.own is not None:
            source.generators.put_own(opening.own)

    def __next__(self) -> Given:
        if self._batches is None:
            raise StopIteration
        while True:
            batch = next(self._batches)
            self._next += 1
            if self._next - 1 not in self._stepped_over:
                return self._next - 1, None, batch

    def close(self) -> None:
        shut_down(self._batches, self._data)
        self._batches = None


class OnceSource(Source):
    """An iterator or generator: it goes forward only. In a new process it is consumed up to its place; it cannot be rewound."""

    kind = "once"

    def __init__(self, data: Iterator[Any]) -> None:
        if inspect.isgenerator(data) and inspect.getgeneratorstate(data) == inspect.GEN_CLOSED:
            raise UsageError(
                "guard.wrap() got a generator that is exhausted. Wrap it before it is read, or wrap a list or loader"
            )
        self._data = data
        self.generators = Generators()
        self.consumed = 0
        self._told = False

    def open(self, opening: Opening) -> OnceFeed:
        target = (opening.extra or {}).get("consumed", self.consumed)
        if target < self.consumed and not self._told:
            self._told = True
            log.warning(
                "nanproof: the data is an iterator that is read once (%s), so it was not rewound: training goes on with what "
                "comes next. Wrap a loader or a list to have it rewound",
                type(self._data).__name__,
            )
        while self.consumed < target:
            next(self._data, None)
            self.consumed += 1
        return OnceFeed(self, opening.batch + self.consumed - target, opening.stepped_over)

    def give(self) -> Any:
        batch = next(self._data)
        self.consumed += 1
        return batch


class OnceFeed(Feed):
    def __init__(self, source: OnceSource, batch: int, stepped_over: Collection[int]) -> None:
        self._source, self._next, self._stepped_over = source, batch, stepped_over
        self.start = Start(source.generators.now())

    def __next__(self) -> Given:
        while True:
            batch = self._source.give()
            self._next += 1
            if self._next - 1 not in self._stepped_over:
                return self._next - 1, None, batch

    def extra(self) -> Plain:
        return {"consumed": self._source.consumed}


class StatefulSource(Source):
    """A loader with a `state_dict` of its own, such as torchdata's: that is its position. Nothing is left out of it."""

    kind = "stateful"

    def __init__(self, loader: Any) -> None:
        self.loader: Any = copy.copy(loader) if isinstance(loader, DataLoader) else loader
        self.generators = Generators(loader=loader)
        self._opened = False

    def open(self, opening: Opening) -> StatefulFeed:
        self._opened = True
        if opening.extra is not None:
            with common_kept():
                self.loader.load_state_dict(opening.extra["inner"])
                return StatefulFeed(self, iter(self.loader), opening)
        return StatefulFeed(self, iter(self.loader), opening)

    def between(self) -> Plain | None:
        return {"inner": self.loader.state_dict()} if self._opened else None


class StatefulFeed(Feed):
    def __init__(self, source: StatefulSource, batches: Iterator[Any], opening: Opening) -> None:
        self._source, self._batches, self._next = source, batches, opening.batch
        self._stepped_over = opening.stepped_over
        self.start = Start(source.generators.now())

    def __next__(self) -> Given:
        while True:
            batch = next(self._batches)
            self._next += 1
            if self._next - 1 not in self._stepped_over:
                return self._next - 1, None, batch

    def extra(self) -> Plain:
        return {"inner": self._source.loader.state_dict()}
