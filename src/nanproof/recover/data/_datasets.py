"""Datasets that give no quarantined sample, for those who build their loaders themselves.

They know nothing of batches. Both can be pickled, so worker processes of any kind can read them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from nanproof.recover.data._feeds import size_of
from nanproof.recover.data._hashes import sample_hash
from nanproof.recover.data._quarantine import Quarantine
from nanproof.recover.data._streams import leaves_out
from nanproof.recover.data._tickets import Ticket, place

log = logging.getLogger("nanproof")


class WrappedDataset(Dataset[Any]):
    """Attributes are those of the dataset within."""

    def __init__(self, dataset: Any, quarantine: Quarantine) -> None:
        self._dataset, self._quarantine = dataset, quarantine

    @property
    def within(self) -> Any:
        """The dataset as the user made it."""
        return self._dataset

    def taken(self) -> list[Ticket]:
        """Always empty: a dataset does not see batches."""
        return []

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in self.__dict__:  # being unpickled
            raise AttributeError(name)
        return getattr(self._dataset, name)


class WrappedMap(WrappedDataset):
    """A map-style dataset. Its length and indices stay what they were, because samplers hold them: a quarantined index gives the
    next sample that is not quarantined, which is then seen more often.

    Worker processes know what was quarantined when they were started.
    """

    def __init__(self, dataset: Any, quarantine: Quarantine) -> None:
        super().__init__(dataset, quarantine)
        self._entries = -1
        self._instead: dict[int, int] = {}

    def __getitem__(self, index: Any) -> Any:
        return self._dataset[self._healthy(index)]

    def __getattr__(self, name: str) -> Any:
        if name == "__getitems__" and hasattr(self.__dict__.get("_dataset"), name):
            return self._several
        return super().__getattr__(name)

    def _several(self, indices: list[Any]) -> Any:
        return self._dataset.__getitems__([self._healthy(index) for index in indices])

    def _healthy(self, index: Any) -> Any:
        if len(self._quarantine) != self._entries:
            self._entries = len(self._quarantine)
            self._instead = self._replacements()
        if not self._instead:
            return index
        number = place(index)
        size = size_of(self._dataset) or 0
        return index if number is None else self._instead.get(number + size if number < 0 else number, index)

    def _replacements(self) -> dict[int, int]:
        size = size_of(self._dataset)
        bad = self._quarantine.leaves_out(size)
        if not bad or not size or len(bad) >= size:
            if bad:
                log.warning("nanproof: all %s samples of the dataset are quarantined, so none is left out", size)
            return {}
        found = {}
        for index in bad:
            other = (index + 1) % size
            while other in bad:
                other = (other + 1) % size
            found[index] = other
        return found


class WrappedStream(WrappedDataset, IterableDataset[Any]):
    """An iterable dataset, without the samples that are quarantined when a pass begins."""

    def __iter__(self) -> Iterator[Any]:
        return self._healthy(iter(self._dataset))

    def _healthy(self, samples: Iterator[Any]) -> Iterator[Any]:
        filtered = self._quarantine.stream_filter()
        if not filtered.hashes and not filtered.places:
            yield from samples
            return
        for ordinal, sample in enumerate(samples):
            if not leaves_out(filtered, ordinal, sample_hash(sample) if filtered.hashes else None):
                yield sample
