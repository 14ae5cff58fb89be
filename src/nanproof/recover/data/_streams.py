"""Loaders over iterable datasets: every sample carries its ordinal and its hash from where it is read to the training process.

They are taken where the dataset is read: in the worker processes, where there are some. A stream is skipped by reading it, but
what is skipped is neither hashed nor collated.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from nanproof.recover.data._feeds import Feed, Given, Opening, Source, in_order, shut_down
from nanproof.recover.data._generators import Generators, Plain, Start
from nanproof.recover.data._hashes import sample_hash
from nanproof.recover.data._quarantine import Quarantine, StreamFilter
from nanproof.recover.data._tickets import Sample

log = logging.getLogger("nanproof")

Read: TypeAlias = dict[int, tuple[int, int]]
"""By worker: how many batches it gave, and the ordinal of the sample it reads next. 0 stands for the training process."""


@dataclass(frozen=True, slots=True)
class Item:
    """A sample on its way to be collated."""

    ordinal: int | None
    """None for one that stands for a sample handed out before: batches must fall to the workers as they did."""
    hash: str | None
    sample: Any


class Part(IterableDataset[Item]):
    """What one worker reads of a stream, without the samples that are left out."""

    def __init__(self, dataset: Any, filtered: StreamFilter, read: Read, batch_size: int | None) -> None:
        self._dataset, self._filtered, self._read, self._batch_size = dataset, filtered, read, batch_size

    def __iter__(self) -> Iterator[Item]:
        return self._items(iter(self._dataset))

    def __len__(self) -> int:
        return len(self._dataset)

    def _items(self, samples: Iterator[Any]) -> Iterator[Item]:
        worker, _ = this_worker()
        batches, first = self._read.get(worker or 0, (0, 0))
        for _ in range(first):
            next(samples, None)
        for _ in range(batches * (self._batch_size or 1)):
            yield Item(None, None, None)
        hashed = self._batch_size is not None or bool(self._filtered.hashes)
        for ordinal, sample in enumerate(samples, first):
            found = sample_hash(sample) if hashed else None
            if not leaves_out(self._filtered, ordinal, found):
                yield Item(ordinal, found, sample)


def this_worker() -> tuple[int | None, int | None]:
    info = get_worker_info()
    return (None, None) if info is None else (info.id, info.num_workers)


def leaves_out(filtered: StreamFilter, ordinal: int, found: str | None) -> bool:
    return found in filtered.hashes or (bool(filtered.places) and (*this_worker(), ordinal) in filtered.places)


class Carried:
    """A batch with what is known about its samples. `batch` is nothing where all of it was handed out before."""

    __slots__ = ("batch", "hashes", "ordinals", "worker", "workers")

    def __init__(self, batch: Any, ordinals: list[int], hashes: list[str | None], worker: int | None, workers: int | None):
        self.batch, self.ordinals, self.hashes, self.worker, self.workers = batch, ordinals, hashes, worker, workers

    def pin_memory(self) -> Carried:
        from torch.utils.data._utils.pin_memory import pin_memory

        return Carried(pin_memory(self.batch), self.ordinals, self.hashes, self.worker, self.workers)

    def samples(self) -> tuple[Sample, ...]:
        pairs = zip(self.ordinals, self.hashes, strict=True)
        return tuple(Sample(ordinal, found, self.worker, self.workers) for ordinal, found in pairs)


class Collate:
    """The loader's own collate function, on samples that come with their origin."""

    def __init__(self, collate: Callable[[Any], Any]) -> None:
        self._collate = collate

    def __call__(self, items: Any) -> Carried:
        worker, workers = this_worker()
        each = items if isinstance(items, list) else [items]
        ordinals = [item.ordinal for item in each if item.ordinal is not None]
        if not ordinals:
            return Carried(None, [], [], worker, workers)
        batch = self._collate([item.sample for item in each] if isinstance(items, list) else items.sample)
        return Carried(batch, ordinals, [item.hash for item in each], worker, workers)


class StreamSource(Source):
    """A loader over an iterable dataset. Workers that persist are replaced when they must learn something new."""

    kind = "stream"

    def __init__(self, loader: DataLoader[Any], dataset: Any, quarantine: Quarantine) -> None:
        self._given, self._quarantine = loader, quarantine
        self.dataset = dataset
        self.batched = loader.batch_sampler is not None
        self.generators = Generators(loader=loader, dataset=loader.dataset)
        self._prepared: tuple[StreamFilter, Read] | None = None
        self.loader: Any = None

    def open(self, opening: Opening) -> StreamFeed:
        extra = opening.extra or {}
        read: Read = {int(w): (b, o) for w, (b, o) in extra.get("read", {}).items()}
        if read and extra.get("workers") != self._given.num_workers:
            log.warning(
                "nanproof: the place in the stream was saved with num_workers=%s, and it is %s now: the samples are shared out "
                "differently, so some may come twice or not at all in this epoch",
                extra.get("workers"),
                self._given.num_workers,
            )
            read = {}
        wanted = (self._quarantine.stream_filter(), read)
        if wanted != self._prepared or opening.start is not None:  # only new workers draw the numbers of an earlier pass again
            if self.loader is not None and self.loader._iterator is not None:
                self.loader._iterator._shutdown_workers()
            self._prepared = wanted
            self.loader = in_order(copy.copy(self._given))
            part = Part(self.dataset, wanted[0], read, self.loader.batch_size if self.batched else None)
            object.__setattr__(self.loader, "dataset", part)
            self.loader.collate_fn = Collate(self.loader.collate_fn)
            self.loader._iterator = None
        return StreamFeed(self, opening, read)


class StreamFeed(Feed):
    def __init__(self, source: StreamSource, opening: Opening, read: Read) -> None:
        again = opening.start
        self._loader, self._batched = source.loader, source.batched
        self._next, self._read = opening.batch, dict(read)
        self._stepped_over: Collection[int] = opening.stepped_over
        with opening.common() if again is not None else nullcontext():
            if again is not None:
                source.generators.put(again.opened)
            self.start = again or Start(source.generators.now())
            self._batches: Iterator[Any] | None = iter(self._loader)
            for _ in range(sum(batches for batches, _ in read.values()) if read else opening.batch):
                self._note(next(self._batches, None))
        if again is not None and opening.own is not None and self._loader.num_workers == 0:
            source.generators.put_own(opening.own)

    def __next__(self) -> Given:
        if self._batches is None:
            raise StopIteration
        while True:
            carried: Carried = next(self._batches)
            if not carried.ordinals:
                continue
            self._note(carried)
            self._next += 1
            if self._next - 1 not in self._stepped_over:
                batch, carried.batch = carried.batch, None  # a ticket keeps the samples, not the batch
                return self._next - 1, carried.samples if self._batched else None, batch

    def _note(self, carried: Carried | None) -> None:
        if carried is not None and carried.ordinals:
            worker = carried.worker or 0
            batches, _ = self._read.get(worker, (0, 0))
            self._read[worker] = (batches + 1, carried.ordinals[-1] + 1)

    def extra(self) -> Plain:
        read = {str(worker): list(counts) for worker, counts in self._read.items()}
        return {"read": read, "workers": self._loader.num_workers}

    def close(self) -> None:
        shut_down(self._batches, self._loader)
        self._batches = None
