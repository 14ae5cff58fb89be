"""Salvage: what is good of a bad step. A batch without some of its rows, exactly as if they had never been in it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nanproof.core._under_way import Attempt
from nanproof.core.support._tree import tensors_in
from nanproof.explain.locate._locate import batch_shape
from nanproof.recover.data._tickets import Ticket


def rest_of(attempt: Attempt, micro_batch: int | None, rows: Collection[int]) -> Attempt | None:
    """The step without the bad rows of a micro-batch, or without all of it where no row is known. None where nothing would be
    left, or where it cannot be told what belongs to which row."""
    assert attempt.batches is not None
    batches = list(attempt.batches)
    which = micro_batch if micro_batch is not None else 0
    if micro_batch is None and len(batches) > 1:
        return None
    tickets = [list(taken) for taken in attempt.tickets]
    left = without(batches[which], rows) if rows else None
    if left is not None:
        batches[which] = left
        for taken in tickets:
            if len(taken) == len(batches):
                taken[which] = _fewer(taken[which], rows)
    elif len(batches) > 1:
        for taken in tickets:
            if len(taken) == len(batches):
                del taken[which]
        del batches[which]
    else:
        return None
    return replace(attempt, batches=tuple(batches), tickets=tickets, parted=True, report=None)


def _fewer(ticket: Ticket, rows: Collection[int]) -> Ticket:
    samples = ticket.samples
    left = None if samples is None else tuple(sample for i, sample in enumerate(samples) if i not in rows)
    return Ticket(ticket.epoch, ticket.batch, left)


def without(batch: Any, rows: Collection[int]) -> Any:
    """The batch without these rows; None where its tensors do not all have one row a sample, or none would be left."""
    samples, _ = batch_shape(batch)
    keep = [i for i in range(samples) if i not in set(rows)]
    if not keep or len(keep) == samples:
        return None
    if any(t.dim() and len(t) != samples for _, t in tensors_in(batch)):
        return None
    return _taken(batch, keep, samples)


def _taken(value: Any, keep: list[int], samples: int) -> Any:
    if isinstance(value, Tensor):
        return value if not value.dim() else value.index_select(0, torch.tensor(keep, device=value.device))
    if isinstance(value, Mapping):
        made: Any = type(value)() if type(value) is dict else copy.copy(value)
        for key, item in value.items():
            made[key] = _taken(item, keep, samples)
        return made
    if isinstance(value, (list, tuple)):
        fields = hasattr(value, "_fields")
        if not fields and len(value) == samples and not any(True for _ in tensors_in(value)):
            return type(value)(value[i] for i in keep)  # a list of texts, names, ...: one a sample
        items = [_taken(item, keep, samples) for item in value]
        return type(value)(*items) if fields else type(value)(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {f.name: _taken(getattr(value, f.name), keep, samples) for f in dataclasses.fields(value) if f.init}
        return dataclasses.replace(value, **changed)
    return value
