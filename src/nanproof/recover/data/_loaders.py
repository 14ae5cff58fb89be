"""Loaders that know their place: they leave quarantined samples out, can be rewound in the middle of a `for` loop, and can be
gone on with in another process.

What is exact, and what is not:

- Order and samples are those of an undisturbed run, for every sampler that draws from a generator of its own, from the loader's,
  or from the global ones at the start of an epoch. One that draws from the global ones all through an epoch, in turns with the
  training, is only repeated if nothing else draws from them.
- Without worker processes, random augmentation is repeated too, where the caller puts the global generators back. Worker
  processes of a map-style dataset start with their seeds anew: their augmentation differs after a rewind. A stream is read again
  from its start with the same seeds, so it repeats; except in workers that persist, which are not seeded anew every epoch.
- A batch without a quarantined sample is smaller by it. A stream fills its batches with the samples that follow. A batch that
  loses all its samples is not handed out; for ranks that train together (`even`) it is made of the samples that follow them
  in the dataset, so that every rank has as many batches as before.
- What was quarantined is left out of passes that begin after it; a rewind begins one. Batches that workers have already loaded
  are handed out as they are.
- A sampler must give its order more than once: one that is itself an iterator cannot be rewound.
- A batch that could not be loaded (an exception in the dataset) is passed over by a rewind only if a later one was handed out.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import DataLoader, Dataset, IterableDataset, IterDataPipe

from nanproof._errors import UsageError
from nanproof.recover.data._consumed import OnceSource, PlainSource, StatefulSource
from nanproof.recover.data._datasets import WrappedDataset, WrappedMap, WrappedStream
from nanproof.recover.data._feeds import Feed, MapSource, Opening, Source, size_of
from nanproof.recover.data._generators import Plain, Start, common_kept
from nanproof.recover.data._hashes import is_row, sample_hash
from nanproof.recover.data._quarantine import Quarantine
from nanproof.recover.data._streams import StreamSource
from nanproof.recover.data._tickets import Sample, Ticket

__all__ = ["Sample", "Ticket", "WrappedDataset", "WrappedLoader", "wrap"]

log = logging.getLogger("nanproof")

_VERSION = 1
_TICKETS_KEPT = 1024
"""Of those that nobody asks for."""
_STARTS_KEPT = 64
"""Epochs that can be begun again after a rewind into an earlier one."""


def wrap(data: Any, quarantine: Quarantine, even: bool = False) -> WrappedLoader | WrappedDataset:
    """A loader, or anything that gives batches, becomes a `WrappedLoader`; a dataset a `WrappedDataset`. What is wrapped already
    is given back. The object itself is not changed. `even`: no batch may fall away."""
    if isinstance(data, (WrappedLoader, WrappedDataset)):
        return data
    if isinstance(data, type):
        raise UsageError(f"guard.wrap() got the class {data.__name__}. Give it an object of that class")
    if isinstance(data, DataLoader):
        return WrappedLoader(data, _loader_source(data, quarantine, even), quarantine)
    if isinstance(data, IterableDataset):
        return WrappedStream(data, quarantine)
    items, iterable = hasattr(data, "__getitem__") and hasattr(data, "__len__"), hasattr(data, "__iter__")
    if isinstance(data, Dataset) or hasattr(data, "__getitems__") or (items and not iterable):
        return WrappedMap(data, quarantine)
    if isinstance(data, (str, bytes, Mapping)) or not iterable:
        raise UsageError(
            f"guard.wrap() got {type(data).__name__}, which gives no batches. It takes a DataLoader, a dataset, or what a `for` "
            "loop gets batches from"
        )
    if hasattr(data, "state_dict") and hasattr(data, "load_state_dict"):
        return WrappedLoader(data, StatefulSource(data), quarantine)
    return WrappedLoader(data, OnceSource(data) if iter(data) is data else PlainSource(data), quarantine)


def _loader_source(loader: DataLoader[Any], quarantine: Quarantine, even: bool) -> Source:
    # torchdata's loader has a state. For a map-style dataset without one, the order is all there is to it.
    stateful = hasattr(loader, "load_state_dict")
    if isinstance(loader.dataset, IterableDataset):
        if stateful:
            return StatefulSource(loader)
        # A graph of pipes is seeded and split by the loader, which must see it as it is.
        if isinstance(loader.dataset, IterDataPipe):
            return PlainSource(loader)
        # Ordinals count what the dataset itself gives: one that leaves out would shift them.
        within = loader.dataset.within if isinstance(loader.dataset, WrappedStream) else loader.dataset
        return StreamSource(loader, within, quarantine)
    return StatefulSource(loader) if stateful and hasattr(loader.dataset, "state_dict") else MapSource(loader, quarantine, even)


@dataclass(frozen=True, slots=True)
class _Pending:
    """A state that the next batch follows on."""

    state: Plain
    until: int
    """The epoch with which the `for` loop ends."""
    rewound: bool
    """An epoch that begins after it, and has begun before, begins as it did."""


class WrappedLoader:
    """In the place of a loader. Everything else that is asked of it is answered by that loader.

    Only one loop at a time can be rewound: the one that got a batch last. Evaluate on the loader itself, not on this.
    """

    def __init__(self, loader: Any, source: Source, quarantine: Quarantine) -> None:
        self._loader, self._source, self._quarantine = loader, source, quarantine
        self._next_epoch = 0
        self._position = (0, 0)
        self._feed: Feed | None = None
        self._loop: weakref.ref[_Loop] | None = None
        self._pending: _Pending | None = None
        self._taken: deque[Ticket] = deque(maxlen=_TICKETS_KEPT)
        self._stepped_over: dict[int, set[int]] = {}
        self._starts: dict[int, Start] = {}

    @property
    def epoch(self) -> int:
        """The epoch that the next `iter()` starts or goes on with: `for epoch in range(loader.epoch, n)`."""
        return self._next_epoch if self._pending is None else self._pending.state["epoch"]

    def __iter__(self) -> Iterator[Any]:
        pending, self._pending = self._pending, None
        loop = _Loop(self, self._next_epoch if pending is None else pending.until)
        if pending is None:
            loop.open(Opening())
        else:
            loop.told = self._source.generators.epochs()
            loop.go_on(pending)
        self._next_epoch = loop.until + 1
        self._loop = weakref.ref(loop)
        return loop

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._loader, name)

    @property
    def size(self) -> int | None:
        """Samples in the dataset, if it has places."""
        return size_of(self._source.dataset) if isinstance(self._source, MapSource) else None

    def taken(self) -> list[Ticket]:
        """The tickets of the batches that were handed out since the last call, or since a rewind."""
        taken = list(self._taken)
        self._taken.clear()
        return taken

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches that were handed out so far. Plain data and tensors.

        After a `break` that is still the place in that epoch: whoever loads it gets the rest of the epoch first.
        """
        loop = None if self._loop is None else self._loop()
        pending = self._pending or (None if loop is None else loop.pending)
        if pending is not None:
            return {**pending.state, "stepped_over": self._steps()}
        epoch, batch = self._position
        feed = self._feed
        at: Plain | None = None
        if feed is not None:
            at = {"start": feed.start.out(), "extra": feed.extra()}
        elif (between := self._source.between()) is not None:
            at = {"start": None, "extra": between}
        return {
            "version": _VERSION,
            "kind": self._source.kind,
            "epoch": epoch,
            "batch": batch,
            "batches": self._length(),
            "at": at,
            "own": self._source.generators.own(),
            "stepped_over": self._steps(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next `iter()` goes on right there."""
        checked = self._checked(state)
        self._starts.clear()
        self._pending = _Pending(checked, checked["epoch"], rewound=False)

    def rewind(self, state: Mapping[str, Any], step_over: Collection[tuple[int, int]] = ()) -> None:
        """The running `for` loop goes on with the first batch after `state`. If that lies in an earlier epoch, the loop gives the
        rest of that epoch and all that follow, up to the end of the one it was in.

        The (epoch, batch) pairs in `step_over` are not handed out again, nor after a resume. An iterator that is read once is
        not rewound: a warning says so.
        """
        checked = self._checked(state)
        for epoch, batch in step_over:
            self._stepped_over.setdefault(int(epoch), set()).add(int(batch))
        loop = None if self._loop is None else self._loop()
        self._taken.clear()
        if loop is None or loop.done:
            until = self._pending.until if self._pending is not None else self._next_epoch
            self._pending = _Pending(checked, max(until, checked["epoch"]), rewound=True)
        else:
            loop.close()
            loop.until = max(loop.until, checked["epoch"])
            self._next_epoch = max(self._next_epoch, loop.until + 1)
            loop.pending = _Pending(checked, loop.until, rewound=True)

    def confirmed(self, ticket: Ticket, rows: Collection[int], batch: Any) -> list[Sample]:
        """The samples in these rows, if fetching them again gives what is in the batch. Else the rows are of something else (read
        ahead, put in another order, augmented at random), and nobody is to be blamed. A stream cannot be asked again."""
        if not isinstance(self._source, MapSource) or not self._source.batched or ticket.samples is None:
            return self.samples_of(ticket, rows)
        collate = self._source.loader.collate_fn
        for row in rows:
            index = ticket.samples[row].index if 0 <= row < len(ticket.samples) else None
            try:
                with common_kept():
                    if index is None or not is_row(collate([self._source.dataset[index]]), batch, row, len(ticket.samples)):
                        return []
            except Exception as error:
                log.debug("nanproof: sample %s could not be compared", index, exc_info=error)
                return []
        return self.samples_of(ticket, rows)

    def samples_of(self, ticket: Ticket, rows: Collection[int]) -> list[Sample]:
        """The samples in these rows of a batch, with their hashes where they can be had: a map-style sample is fetched again,
        which costs no random numbers. Where an element of the dataset is a whole batch (`batch_size=None`), it is that element.
        """
        samples = ticket.samples
        if samples is None:
            return []
        if isinstance(self._source, MapSource):
            whole = not self._source.batched and len(samples) == 1
            chosen = samples[:1] if whole and rows else [samples[row] for row in rows if 0 <= row < len(samples)]
            return [self._hashed(sample, self._source) for sample in chosen]
        return [samples[row] for row in rows if 0 <= row < len(samples)]

    def _hashed(self, sample: Sample, source: MapSource) -> Sample:
        if sample.index is None or sample.hash is not None:
            return sample
        own = source.generators.own()
        try:
            with common_kept():
                return replace(sample, hash=sample_hash(source.dataset[sample.index]))
        except Exception as error:
            log.warning("nanproof: sample %d could not be fetched again: %s: %s", sample.index, type(error).__name__, error)
            return sample
        finally:
            source.generators.put_own(own)

    def _begin_again(self, epoch: int) -> Opening:
        start = self._starts.get(epoch)
        return Opening() if start is None or self._source.kind in ("once", "stateful") else Opening(start=start, going_on=False)

    def _opened(self, loop: _Loop, feed: Feed, batch: int) -> None:
        self._position, self._feed = (loop.epoch, batch), feed
        self._starts[loop.epoch] = feed.start
        while len(self._starts) > _STARTS_KEPT:
            del self._starts[min(self._starts)]

    def _finished(self, epoch: int) -> None:
        self._position, self._feed = (epoch + 1, 0), None

    def _given(self, loop: _Loop, feed: Feed, batch: int, samples: Any) -> None:
        self._position, self._feed = (loop.epoch, batch + 1), feed
        if self._loop is None or self._loop() is not loop:
            self._loop = weakref.ref(loop)
        self._taken.append(Ticket(loop.epoch, batch, samples))

    def _steps(self) -> list[list[int]]:
        return [[epoch, batch] for epoch, batches in sorted(self._stepped_over.items()) for batch in sorted(batches)]

    def _length(self) -> int | None:
        if not isinstance(self._source, MapSource):  # others may count what they hold, or warn later if they held more
            return None
        try:
            return len(self._loader)
        except (TypeError, NotImplementedError):
            return None

    def _checked(self, state: Mapping[str, Any]) -> Plain:
        if not isinstance(state, Mapping) or not {"version", "kind", "epoch", "batch", "at", "own", "stepped_over"} <= set(state):
            raise UsageError("this is no state of a wrapped loader. Give what its state_dict() returned")
        if state["version"] != _VERSION or state["kind"] != self._source.kind:
            raise UsageError(
                f"this state is of a loader of another kind ({state['kind']}, version {state['version']}) than this one "
                f"({self._source.kind}, version {_VERSION}). Wrap the data in the same way as when it was saved"
            )
        if state.get("batches") != self._length():
            log.warning(
                "nanproof: an epoch had %s batches when this position was saved and has %s now: the samples after it are others",
                state.get("batches"),
                self._length(),
            )
        for epoch, batch in state["stepped_over"]:
            self._stepped_over.setdefault(epoch, set()).add(batch)
        return dict(state)


class _Loop:
    """What a `for` loop holds. Its feed may be replaced under it."""

    def __init__(self, owner: WrappedLoader, epoch: int) -> None:
        self._owner = owner
        self.epoch = self.until = epoch
        self.done = False
        self.pending: _Pending | None = None
        self.told: dict[str, int] = {}
        """The epoch that samplers were told when the loop began: it is for the last epoch that the loop gives."""
        self._feed: Feed | None = None

    def open(self, opening: Opening) -> None:
        owner = self._owner
        owner._quarantine.refresh()
        stepped_over = owner._stepped_over.setdefault(self.epoch, set())
        self._feed = owner._source.open(replace(opening, stepped_over=frozenset(stepped_over)))
        owner._opened(self, self._feed, opening.batch)

    def go_on(self, pending: _Pending) -> None:
        """Open the feed that follows on a state. Not done before it is needed: by then the caller has put the global generators
        back."""
        state, at = pending.state, pending.state["at"]
        self.epoch = state["epoch"]
        if at is None:
            self._owner._source.generators.put_own(state["own"])
            self.open(self._owner._begin_again(self.epoch) if pending.rewound else Opening())
        elif at["start"] is None:
            self.open(Opening(extra=at["extra"]))
        else:
            start = Start.read(at["start"])
            self.open(Opening(batch=state["batch"], start=start, extra=at["extra"], own=state["own"]))

    def close(self) -> None:
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def __iter__(self) -> _Loop:
        return self

    def __next__(self) -> Any:
        owner = self._owner
        if self.pending is not None:
            pending, self.pending = self.pending, None
            self.go_on(pending)
        while not self.done and self._feed is not None:
            try:
                batch, samples, data = next(self._feed)
            except StopIteration:
                self.close()
                owner._finished(self.epoch)
                if self.epoch >= self.until:
                    self.done = True
                    break
                self.epoch += 1
                if self.epoch == self.until:
                    owner._source.generators.put_epochs(self.told)
                self.open(owner._begin_again(self.epoch))
                continue
            owner._given(self, self._feed, batch, samples)
            return data
        raise StopIteration

    def __del__(self) -> None:
        with suppress(Exception):
            self.close()
