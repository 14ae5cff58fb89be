"""Read a batch of tokens: which lookups are the text, whether the next token is the target, where
documents begin, and what is padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nanproof.core.support._tree import tensors_in
from nanproof.probes._probing import Probing
from nanproof.probes._recorder import Compared, Recorder, Swap

SHORTEST = 4
"""Tokens a row that are needed to tell a shift from chance."""


@dataclass(frozen=True, slots=True)
class NextToken:
    """A stream of tokens that a loss predicts one ahead."""

    ids: Tensor
    """(samples, length)"""
    supervised: Tensor
    """(samples, positions): where the loss has a target."""
    result: int
    """Index among `Recorder.results()`."""


def as_rows(ids: Tensor) -> Tensor:
    """One flat row of packed documents is a batch of one."""
    return ids.unsqueeze(0) if ids.dim() == 1 else ids


def streams(recorder: Recorder) -> list[Tensor]:
    """The ids of each lookup that could be text, each once."""
    found: list[Tensor] = []
    for lookup in recorder.lookups:
        ids = as_rows(lookup.ids)
        if ids.dim() == 2 and ids.shape[1] >= SHORTEST and not any(torch.equal(ids, other) for other in found):
            found.append(ids)
    return found


def next_token(probing: Probing) -> NextToken | None:
    """Find the stream whose token at t + 1 is the target at t."""
    results = probing.base.results()
    for ids in streams(probing.base):
        length = ids.shape[1]
        for i, result in enumerate(results):
            for targets in _targets(probing, result, ids):
                ahead = ids[:, 1:]
                shown = targets[:, : length - 1]
                counts = shown != result.ignored
                many = int(counts.sum())
                if many < SHORTEST:
                    continue
                same = float(((shown == ahead) & counts).sum()) / many
                equal = float(((shown == ids[:, :-1]) & counts).sum()) / many
                varied = float((ids[:, 1:] != ids[:, :-1]).float().mean())
                if same > 0.95 and equal < 0.9 and varied > 0.05:
                    return NextToken(ids, targets != result.ignored, i)
    return None


def _targets(probing: Probing, result: Compared, ids: Tensor) -> Iterator[Tensor]:
    """What a result is compared with, as (samples, positions). Where no loss was seen, tensors of the batch."""
    samples, length = ids.shape
    if result.targets is not None:
        if result.classes and result.targets.numel() in (samples * length, samples * (length - 1)):
            yield result.targets.reshape(samples, -1)
    elif result.values.dim() == 3 and result.values.shape[:2] == ids.shape:
        for _, t in tensors_in(probing.batch):
            if t.shape == ids.shape and not t.is_floating_point() and t.dtype != torch.bool:
                yield t


def others(ids: Tensor, where: Tensor, source: Tensor | None = None) -> Tensor:
    """The ids with other ones in some places, taken from the same text."""
    pool = torch.unique((ids if source is None else ids[source]).flatten())
    if len(pool) < 2:
        pool = torch.unique(ids.flatten())
    generator = torch.Generator().manual_seed(0)
    picks = torch.randint(0, max(1, len(pool) - 1), ids.shape, generator=generator).to(ids.device)
    other = pool[picks]
    other = torch.where(other == ids, pool[-1], other)
    other = torch.where(other == ids, pool[0], other)
    return torch.where(where, other, ids)


def swap(ids: Tensor, new: Tensor) -> Swap:
    """Put other ids into every lookup of these."""

    def change(given: Tensor) -> Tensor | None:
        return new.reshape(given.shape) if given.numel() == ids.numel() and torch.equal(as_rows(given), ids) else None

    return change


def text_of_batch(probing: Probing) -> list[Tensor]:
    """Streams that are a tensor of the batch, perhaps without its last or first token; the richest first."""
    whole = [as_rows(t) for _, t in tensors_in(probing.batch) if _whole(t) and t.dim() in (1, 2)]
    found = [ids for ids in streams(probing.base) if any(_is_part(ids, t) for t in whole)]
    return sorted(found, key=lambda ids: -len(torch.unique(ids)))


def _whole(t: Tensor) -> bool:
    return not t.is_floating_point() and not t.is_complex() and t.dtype != torch.bool


def _is_part(ids: Tensor, t: Tensor) -> bool:
    if t.dim() != 2 or t.shape[0] != ids.shape[0] or t.device != ids.device:
        return False
    if t.shape == ids.shape:
        return torch.equal(t.long(), ids.long())
    return t.shape[1] == ids.shape[1] + 1 and torch.equal(t[:, :-1].long(), ids.long())


def padding(probing: Probing, ids: Tensor) -> tuple[str, Tensor] | None:
    """Find the padding of a stream: (name of the tensor that marks it, where). Padding is one id at
    an end of a row, so a mask that marks something else is not mistaken for it."""
    samples, length = ids.shape
    for name, t in tensors_in(probing.batch):
        if t.dim() == 2 and t.shape[0] == samples and length <= t.shape[1] <= length + 1 and _marks(name):
            on = (t == 1)[:, :length]
            if bool(((t == 0) | (t == 1)).all()):
                for pads in (~on, on):
                    if _is_padding(ids, pads):
                        return name, pads
        elif t.dim() == 1 and len(t) == samples and "len" in key_of(name) and _whole(t):
            pads = torch.arange(length, device=ids.device) >= t.to(ids.device).unsqueeze(1)
            if _is_padding(ids, pads):
                return name, pads
    for compared, number in probing.base.marked:
        if compared.shape != ids.shape or not torch.equal(compared, ids) or number not in _padding_ids(probing, ids):
            continue
        pads = ids == number
        if _is_padding(ids, pads) and int(pads.sum(1).max()) >= 2:
            return f"the model compares its ids with {number:g}, which", pads
    return None


def _padding_ids(probing: Probing, ids: Tensor) -> set[int]:
    """Ids that the model declares to be padding. A model may also compare its ids with the end of the
    text, to pool there, so an id that marks an end does not count."""
    found = {x.padding for x in probing.base.lookups if x.ids.shape == ids.shape and torch.equal(x.ids, ids)}
    ends: set[Any] = set()
    for module in probing.replay.modules:
        config = getattr(module, "config", None)
        for each in (config, getattr(config, "text_config", None)):
            found.add(getattr(each, "pad_token_id", None))
            for name in ("eos_token_id", "sep_token_id", "bos_token_id", "cls_token_id"):
                end = getattr(each, name, None)
                ends.update(end if isinstance(end, (list, tuple)) else [end])
    return {n for n in found - ends if isinstance(n, int)}


def key_of(name: str) -> str:
    """The last part of the expression that reaches a tensor, in small letters."""
    return name.lower().rsplit("[", 1)[-1].rsplit(".", 1)[-1]


def _marks(name: str) -> bool:
    return "mask" in key_of(name) or "pad" in key_of(name) or _unnamed(name)


def _unnamed(name: str) -> bool:
    """Whether a tensor is an item of a tuple: what it holds must tell what it is."""
    return key_of(name).rstrip("]").isdigit()


def _is_padding(ids: Tensor, pads: Tensor) -> bool:
    if not bool(pads.any()) or bool(pads.all(1).any()) or len(torch.unique(ids[pads])) != 1:
        return False
    turns = (pads[:, 1:] != pads[:, :-1]).sum(1)
    return bool((turns <= 1).all()) and len(torch.unique(ids[~pads])) > 1


def documents(probing: Probing, ids: Tensor) -> tuple[str, Tensor] | None:
    """Find packed documents: (name of the tensor that marks them, number of the document at each
    position; -1 for padding)."""
    samples, length = ids.shape
    marked = padding(probing, ids)
    for name, t in tensors_in(probing.batch):
        key = key_of(name)
        if _unnamed(name) and (_whole(t) and t.dim() == 2) and next_token(probing) is not None:
            key = "position" if bool((t[:, 1:] < t[:, :-1]).any()) else "documents"
        numbers = _numbers(key, t, samples, length, probing)
        if numbers is None:
            continue
        numbers = numbers.to(ids.device).clone()
        if marked is not None:
            numbers[marked[1]] = -1
        if any(_several(row) for row in numbers):
            return name, numbers
    return None


def _several(row: Tensor) -> bool:
    """Whether a row has two documents of at least two tokens."""
    return sum(int((row == n).sum()) >= 2 for n in torch.unique(row[row >= 0]).tolist()) >= 2


def _numbers(key: str, t: Tensor, samples: int, length: int, probing: Probing) -> Tensor | None:
    if not t.dim() or t.is_complex() or not t.numel():
        return None
    if _whole(t) and t.dim() in (1, 2) and "cu_seq" in key:
        ends = t.flatten().tolist()
        if samples == 1 and ends[0] == 0 and len(ends) > 2 and ends[-1] == length and ends == sorted(ends):
            return torch.bucketize(torch.arange(length), torch.tensor(ends[1:]), right=True).unsqueeze(0)
        return None
    if t.dim() >= 3 and t.shape[-2] == t.shape[-1] == length and t.shape[0] in (1, samples) and "mask" in key:
        return _blocks(t.reshape(t.shape[0], -1, length, length)[:, 0]).expand(samples, length)
    rows = as_rows(t)
    if not _whole(t) or rows.dim() != 2 or rows.shape[0] not in (1, samples) or not length <= rows.shape[1] <= length + 1:
        return None
    rows = rows[:, :length].expand(samples, length)
    if "position" in key:
        begins = rows == 0
        follows = rows[:, 1:] == rows[:, :-1] + 1
        return begins.long().cumsum(1) - 1 if bool((follows | begins[:, 1:]).all()) and bool(begins[:, 0].all()) else None
    turns = rows[:, 1:] != rows[:, :-1]
    if any(word in key for word in ("doc_", "document_id", "seq_id", "sequence_id")):
        return F.pad(turns.long().cumsum(1), (1, 0)) if float(turns.float().mean()) <= 0.5 else None
    named = any(word in key for word in ("documents", "segment", "pack", "attention_mask"))
    steps = rows[:, 1:] - rows[:, :-1]
    ordered = bool((((steps >= 0) & (steps <= 1)) | (rows[:, 1:] == 0)).all())
    if not named or not ordered or (int(rows.max()) < 2 and ("segment" in key or "attention" in key)):
        return None
    # BERT's segments are sentences of one text that are meant to see each other.
    if "segment" in key and next_token(probing) is None:
        return None
    # Numbers that begin at 1 leave 0 for padding.
    return torch.where(rows == 0, -1, rows) if int(rows.max()) > 1 and bool((rows[:, 0] == 1).all()) else rows


def _blocks(mask: Tensor) -> Tensor:
    """The documents of a mask over pairs of positions: one begins where nothing before is visible."""
    visible = mask if mask.dtype == torch.bool else (mask == 1 if float(mask.max()) == 1 else mask > -1)
    before = torch.ones_like(visible).tril(-1)
    return (~(visible & before).any(-1)).long().cumsum(-1) - 1


def named(value: Any, limit: int = 4) -> str:
    """A few numbers, for a sentence."""
    numbers = list(value)
    return ", ".join(map(str, numbers[:limit])) + (f" and {len(numbers) - limit} more" if len(numbers) > limit else "")
