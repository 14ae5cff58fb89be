"""Supply: a run's data, as recovery sees it. Which loaders were wrapped, where they are, what each step was made of, and which
samples are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from nanproof._records import Incident
from nanproof.core._under_way import Attempt
from nanproof.core.support._context import RandomState
from nanproof.recover.data._loaders import WrappedDataset, WrappedLoader, wrap
from nanproof.recover.data._quarantine import FILE, Entry, Quarantine
from nanproof.recover.state._sealed import now
from nanproof.recover.state._state import encode_random

_REMEMBERED = 20_000
"""Steps whose batches are remembered by number, for stepping over them."""

Places: TypeAlias = list[list[tuple[int, int]]]
"""For each loader, (epoch, batch) of some of its batches."""


class Supply:
    """The wrapped loaders of a run, in the order in which they were wrapped."""

    def __init__(self, home: str | Path | None, even: bool) -> None:
        self.quarantine = Quarantine(None if home is None else Path(home) / FILE)
        self._even = even
        self.wrapped = False
        """Whether any data was wrapped."""
        self._loaders: list[WrappedLoader] = []
        self._resumed: list[dict[str, Any]] = []
        """Of a resumed run: where its loaders were, for those that are wrapped later."""
        self.beginning: list[dict[str, Any]] = []
        self.random: dict[str, Any] | None = None
        """Where loaders and random numbers were before the first step."""
        self._places: dict[int, Places] = {}

    def wrap(self, data: Any, devices: Sequence[torch.device]) -> WrappedLoader | WrappedDataset:
        wrapped = wrap(data, self.quarantine, even=self._even)
        self.wrapped = True
        if isinstance(wrapped, WrappedLoader) and all(wrapped is not known for known in self._loaders):
            if len(self._loaders) < len(self._resumed):
                wrapped.load_state_dict(self._resumed[len(self._loaders)])
            self._loaders.append(wrapped)
            self.beginning = [*self.beginning, wrapped.state_dict()]
            self.random = encode_random(RandomState.now(devices))
        return wrapped

    def note(self, attempt: Attempt) -> None:
        """A new step begins: which batches is it made of?"""
        if self._loaders:
            attempt.tickets = [loader.taken() for loader in self._loaders]
            self._places[attempt.step] = [[ticket.key for ticket in taken] for taken in attempt.tickets]
            self._places.pop(attempt.step - _REMEMBERED, None)

    def positions(self) -> list[dict[str, Any]]:
        return [loader.state_dict() for loader in self._loaders]

    def fits(self, positions: Sequence[dict[str, Any]]) -> bool:
        """Whether all the data can be rewound to there."""
        return bool(self._loaders) and len(positions) == len(self._loaders)

    def rewind(self, positions: Sequence[dict[str, Any]], over: Places) -> None:
        """In a running loop: go on from there, without these batches."""
        for i, (loader, position) in enumerate(zip(self._loaders, positions, strict=True)):
            loader.rewind(position, over[i] if over else ())

    def resume(self, positions: Sequence[dict[str, Any]]) -> None:
        """In a new process; also for loaders that are wrapped later."""
        self._resumed = list(positions)
        for loader, position in zip(self._loaders, self._resumed, strict=False):
            loader.load_state_dict(position)
        self._places.clear()

    def forget_since(self, step: int) -> None:
        self._places = {s: places for s, places in self._places.items() if s < step}

    def of_steps(self, since: int, until: int, margin: int) -> Places:
        """What these steps were made of, and a margin after it."""
        found: list[set[tuple[int, int]]] = [set() for _ in self._loaders]
        for step in range(since, until + 1):
            for places, given in zip(found, self._places.get(step, ()), strict=False):
                places.update(given)
        for places in found:
            if places:
                epoch, last = max(places)
                places.update((epoch, last + 1 + i) for i in range(margin))
        return [sorted(places) for places in found]

    def knows(self, attempt: Attempt) -> bool:
        """Whether it can be told which samples a step is made of."""
        return attempt.batches is not None and any(len(taken) == len(attempt.batches) for taken in attempt.tickets)

    def leave_out(self, attempt: Attempt, incident: Incident) -> list[int | None]:
        """Put the samples that are to blame into quarantine; their places in the dataset. None of them where several loaders
        fill the batch, or where it is not what the loader gave: an innocent one would be left out for good."""
        assert attempt.batches is not None and incident.diagnosis is not None
        which, rows = incident.micro_batch or 0, incident.diagnosis.samples
        entries = []
        filled = [(loader, taken) for loader, taken in zip(self._loaders, attempt.tickets, strict=True) if taken]
        for loader, taken in filled if len(filled) == 1 else ():
            if len(taken) != len(attempt.batches):
                continue
            entries = [
                Entry(
                    index=sample.index,
                    hash=sample.hash,
                    size=loader.size,
                    worker=sample.worker,
                    workers=sample.workers,
                    step=incident.step,
                    cause=incident.diagnosis.cause,
                    bundle=incident.bundle,
                    at=now(),
                )
                for sample in loader.confirmed(taken[which], rows, attempt.batches[which])
            ]
        self.quarantine.add(entries)
        return [entry.index for entry in entries]
