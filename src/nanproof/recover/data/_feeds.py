"""One pass over the data, from any place on.

A `Source` stands for the data and opens a `Feed` for a pass. A feed gives each batch with its place in the epoch and its
samples, and says as plain data what another feed needs to go on after it. Here are those of map-style datasets; streams, and
data that can only be consumed, have their own files.
"""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.utils.data import DataLoader

from nanproof.recover.data._generators import Generators, Plain, Start, common_kept
from nanproof.recover.data._quarantine import Quarantine
from nanproof.recover.data._tickets import place

log = logging.getLogger("nanproof")

Given: TypeAlias = tuple[int, Any, Any]
"""A batch's place, its samples (as `Ticket` takes them), and itself."""


@dataclass(frozen=True, slots=True)
class Opening:
    """Where a feed begins."""

    batch: int = 0
    start: Start | None = None
    """None: a new epoch, in the order that the generators give now."""
    extra: Plain | None = None
    """What `Feed.extra` said."""
    own: Plain | None = None
    """The states that the data's own generators had at that place."""
    stepped_over: Collection[int] = ()
    """Places that are not handed out."""
    going_on: bool = True
    """The global generators are left as they are found. False where an epoch is begun again: they are then as they were."""

    def common(self) -> AbstractContextManager[None]:
        return common_kept() if self.going_on else nullcontext()


class Feed(ABC):
    """An iterator over what is left of an epoch."""

    start: Start

    @abstractmethod
    def __next__(self) -> Given: ...

    def extra(self) -> Plain:
        return {}

    def close(self) -> None:
        """Called when nobody will ask for another batch. `start` and `extra` still answer."""
        return


class Source(ABC):
    """Data that a `WrappedLoader` stands in for."""

    kind: str
    generators: Generators

    @abstractmethod
    def open(self, opening: Opening) -> Feed: ...

    def between(self) -> Plain | None:
        """What it takes to begin the next epoch, besides generators."""
        return None


class MapSource(Source):
    """A loader over a map-style dataset. Batches are skipped by skipping their indices: no data is loaded."""

    kind = "map"

    def __init__(self, loader: DataLoader[Any], quarantine: Quarantine, even: bool) -> None:
        self._quarantine, self.even = quarantine, even
        self.dataset: Any = loader.dataset
        self.generators = Generators(loader=loader, dataset=loader.dataset)
        self.batched = loader.batch_sampler is not None
        self._order = _Order(loader.batch_sampler if self.batched else loader.sampler, self)
        self.loader = in_order(copy.copy(loader))
        # A loader refuses to have these set; a copy that nobody else sees may.
        object.__setattr__(self.loader, "batch_sampler" if self.batched else "sampler", self._order)
        self.loader._iterator = None

    def open(self, opening: Opening) -> MapFeed:
        return MapFeed(self, self._order, opening, self._quarantine.leaves_out(size_of(self.dataset)))


class MapFeed(Feed):
    def __init__(self, source: MapSource, order: _Order, opening: Opening, left_out: frozenset[int]) -> None:
        again = opening.start
        self._source, self._next = source, opening.batch
        with opening.common() if again is not None else nullcontext():
            if again is not None:
                source.generators.put(again.opened)
            self.start = again or Start(source.generators.now())
            size = size_of(source.dataset) if source.even else None
            order.plan = _Plan(self.start, again is not None, opening.batch, opening.stepped_over, left_out, size)
            self._batches: Iterator[Any] | None = iter(source.loader)
            self._run = order.run
            if again is not None and again.at_first is not None:
                self._run.begin()
        workers = (opening.extra or {}).get("workers", 0) or source.loader.num_workers
        if again is not None and opening.own is not None and not workers:
            # Exact, and also right for an augmentation that draws from the loader's generator. Workers read ahead: with them
            # the sampler's generator is where the skipping left it.
            source.generators.put_own(opening.own)

    def __next__(self) -> Given:
        if self._batches is None:
            raise StopIteration
        given = self._run.given
        try:
            batch = next(self._batches)
        except StopIteration:
            raise
        except Exception:
            if given:  # the batch that could not be loaded; the loader goes on with the next
                given.popleft()
            raise
        self._next, indices = given.popleft() if given else (self._next, None)
        self._next += 1
        return self._next - 1, indices, batch

    def extra(self) -> Plain:
        return {"workers": self._source.loader.num_workers}

    def close(self) -> None:
        shut_down(self._batches, self._source.loader)
        self._batches = None


@dataclass(slots=True)
class _Plan:
    start: Start
    again: bool
    skip: int
    stepped_over: Collection[int]
    left_out: frozenset[int]
    size: int | None
    """Of the dataset, where no batch may fall away: then one that would is made of the samples that follow its own."""


class _Order:
    """In the place of a loader's sampler: gives what that gives, less what is left out or stepped over."""

    plan: _Plan
    run: _Run

    def __init__(self, sampler: Any, source: MapSource) -> None:
        self.sampler, self.generators, self.batched = sampler, source.generators, source.batched

    def __iter__(self) -> _Run:
        # A loader with workers asks twice, and uses the second.
        self.run = _Run(self, self.plan)
        return self.run

    def __len__(self) -> int:
        return len(self.sampler)


class _Run:
    """One epoch's order. Generators are asked, and numbers drawn, at the same moments as without it."""

    def __init__(self, order: _Order, plan: _Plan) -> None:
        self._plan, self._generators, self._batched = plan, order.generators, order.batched
        start = plan.start
        if plan.again:
            before = self._generators.now()
            self._generators.put(start.at_iter or start.opened)
            self._inner = iter(order.sampler)
            before.common.restore()  # next, the loader draws the seed of its workers
            self._generators.put_own(before.own)
        else:
            start.at_iter = self._generators.now(start.opened)
            self._inner = iter(order.sampler)
        self._begun = False
        self._peeked: list[Any] = []
        self._place = 0
        self.given: deque[tuple[int, tuple[Any, ...] | None]] = deque()
        """Place and indices of the batches that the loader has asked for and not yet handed out."""

    def begin(self) -> None:
        if self._begun:
            return
        self._begun = True
        plan = self._plan
        if not plan.again or plan.start.at_first is None:
            plan.start.at_first = self._generators.now(plan.start.at_iter)
            return
        self._generators.put(plan.start.at_first)
        while self._place < plan.skip:
            next(self._inner, None)
            self._place += 1
        if not plan.skip:  # what the sampler draws with its first batch belongs to this moment
            self._peeked = [batch for batch in [next(self._inner, None)] if batch is not None]

    def __iter__(self) -> _Run:
        return self

    def __next__(self) -> Any:
        self.begin()
        while True:
            indices = self._peeked.pop() if self._peeked else next(self._inner)
            here = self._place
            self._place += 1
            if here in self._plan.stepped_over:
                continue
            many = self._batched or isinstance(indices, (list, tuple))
            if self._plan.left_out:
                left = _without(indices if many else [indices], self._plan.left_out)
                if not left and self._plan.size is not None:
                    left = _instead(indices if many else [indices], self._plan.left_out, self._plan.size)
                if not left:
                    continue
                indices = left if many else left[0]
            self.given.append((here, tuple(indices) if many else (indices,)))
            return indices


def _without(indices: Any, left_out: frozenset[int]) -> Any:
    if isinstance(indices, list) and indices and type(indices[0]) is int and left_out.isdisjoint(indices):  # nearly always
        return indices
    return [index for index in indices if place(index) not in left_out]


def _instead(indices: Any, left_out: frozenset[int], size: int) -> list[int]:
    """For each the next place that is not left out."""
    if len(left_out) >= size:
        return []
    found = []
    for index in indices:
        at = (place(index) or 0) % size
        while at in left_out:
            at = (at + 1) % size
        found.append(at)
    return found


def size_of(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None


def in_order(loader: Any) -> Any:
    """Batches that come in the order of their loading have no place."""
    if not getattr(loader, "in_order", True):
        log.info("nanproof: the wrapped loader gives its batches in order (in_order=True), so that each has a place")
        loader.in_order = True
    return loader


def shut_down(batches: Any, loader: Any) -> None:
    """Worker processes end now, not when an iterator is collected. Persistent ones stay for the next pass."""
    if not getattr(loader, "persistent_workers", False) and hasattr(batches, "_shutdown_workers"):
        with suppress(Exception):
            batches._shutdown_workers()
