"""Probe the padding of sequences of numbers: sound, sensor data, features of frames or boxes.

The padding far from the content gets other numbers. A model that masks it keeps its predictions, apart
from those for the padding itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nanproof.core.support._tree import map_tensors, tensors_in
from nanproof.probes._contract import ProbeResult, finding
from nanproof.probes._probing import Probing, shaken
from nanproof.probes._recorder import Recorder
from nanproof.probes._tokens import SHORTEST, key_of, padding, text_of_batch

WAVE = 64
"""Numbers a row that are needed to take plain rows of numbers for a sequence."""
LEAST = 0.02
"""How far padding must move a prediction, compared with as much of the content."""
_OTHER_MASKS = ("observed", "missing", "loss", "label", "target", "token", "text", "input_ids")


@dataclass(frozen=True, slots=True)
class Padded:
    """A sequence of numbers with padding."""

    name: str
    marker: str
    values: Tensor
    """(samples, positions, ...)"""
    pads: Tensor
    """(samples, positions)"""


def padded_features(probing: Probing) -> Iterator[ProbeResult]:
    """Do predictions depend on the padding of a sequence of numbers?"""
    base = probing.base
    # A convolution over clips of one length reads their silence on purpose, and so does a norm over positions.
    if base.normalised or (base.convolved and not base.mixers):
        return
    if any(padding(probing, ids) is not None for ids in text_of_batch(probing)):
        return
    found = next(_padded(probing), None)
    if found is None:
        return
    noise = probing.weights
    answer = _seen(probing, found) or (_seen(probing, found, noise) if noise else None)
    if answer is None:
        return
    change, control = answer
    did = f"put other numbers into the padding of {found.name} ({found.marker} marks it)"
    if not change:
        yield ProbeResult("padding-changes-loss", did, f"predictions stayed; other content moves them by {control:.2g}")
        return
    rows = tuple(torch.nonzero(_far(found.pads).any(1)).flatten().tolist())
    saw = f"all predictions of padded samples moved, by up to {change:.2g}; other content moves them by {control:.2g}"
    fix = "Pass the padding mask to every layer that mixes positions (attention, pooling, recurrence), or pack the sequences."
    yield finding("padding-changes-loss", did, saw, fix, confidence=0.9, phase="forward", samples=rows)


def _padded(probing: Probing) -> Iterator[Padded]:
    """Sequences of numbers whose padding a mask or the lengths in the batch mark."""
    tensors = list(tensors_in(probing.batch))
    for name, x in tensors:
        if not x.is_floating_point() or x.dim() < 2 or x.layout is not torch.strided:
            continue
        samples, length = x.shape[:2]
        if length < (WAVE if x.dim() == 2 else SHORTEST):
            continue
        for marker, t in tensors:
            if t is x or t.device != x.device:
                continue
            for pads in _marked(marker, t, samples, length):
                if _is_padding(x, pads):
                    yield Padded(name, marker, x, pads)


def _marked(marker: str, t: Tensor, samples: int, length: int) -> Iterator[Tensor]:
    key = key_of(marker)
    if any(word in key for word in _OTHER_MASKS):
        return
    if t.shape == (samples, length) and ("mask" in key or "pad" in key) and bool(((t == 0) | (t == 1)).all()):
        yield t == 0
        yield t == 1
    elif t.shape == (samples,) and "len" in key and not t.is_floating_point() and t.dtype != torch.bool:
        yield torch.arange(length, device=t.device) >= t.unsqueeze(1)


def _is_padding(x: Tensor, pads: Tensor) -> bool:
    """Padding is one value at an end of rows of different lengths, and the content is not that value."""
    lengths = (~pads).sum(1)
    if len(torch.unique(lengths)) < 2 or bool((lengths == 0).any()) or bool(((pads[:, 1:] != pads[:, :-1]).sum(1) > 1).any()):
        return False
    fill, content = x[pads], x[~pads]
    same = (content == fill[:1]).flatten(1).all(1) if content.dim() > 1 else content == fill[0]
    return bool((fill == fill[:1]).all()) and float(same.float().mean()) < 0.5 and bool(_far(pads).any())


def _far(pads: Tensor) -> Tensor:
    """The half of each row's padding that is farther from the content: a convolution sees a little across the edge."""
    many = pads.sum(1, keepdim=True)
    rank = torch.where(pads[:, -1:], pads.long().cumsum(1), pads.long().flip(1).cumsum(1).flip(1))
    return pads & (rank > (many + 1) // 2)


def _with(batch: Any, x: Tensor, where: Tensor, pads: Tensor) -> Any:
    """The batch with other numbers in some places, as large as the content's."""
    content = x[~pads].float()
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x.device) * content.std() + content.mean()
    new = torch.where(where.reshape(*where.shape, *[1] * (x.dim() - 2)), noise.to(x.dtype), x.detach())
    return map_tensors(batch, lambda t: new if t is x else t)


def _seen(probing: Probing, found: Padded, noise: Sequence[Tensor] = ()) -> tuple[float, float] | None:
    """How far the padding moves the predictions of a padded sample, and how far content does. 0 if some prediction of each
    sample stays, as those for the content do in a model that masks its padding. None if other content moves nothing either."""
    x, pads = found.values, found.pads
    far = _far(pads)
    rows = far.any(1) & ((~pads).float().mean(1) > 0.1)
    content = ~pads & (((~pads).cumsum(1) * 2) <= (~pads).sum(1, keepdim=True) + 1)
    before = probing.run(shaken(noise))
    after = probing.run(shaken(noise), batch=_with(probing.batch, x, far, pads))
    other = probing.run(shaken(noise), batch=_with(probing.batch, x, content, pads))
    answers: list[tuple[float, float]] = []
    for a, b, c in zip(*(_by_row(r, len(x)) for r in (before, after, other)), strict=False):
        if a is None or b is None or c is None or not a.shape == b.shape == c.shape or not bool(rows.any()):
            continue
        a, b, c = a[rows], b[rows], c[rows]
        control = float((a - c).abs().max())
        if control == 0:
            continue
        change = (a - b).abs()
        rounding = 16 * torch.finfo(torch.float32).eps * float(a.abs().max())
        everywhere = float((change > rounding).double().mean(1).max()) > 0.98
        most = float(change.max())
        answers.append((most if everywhere and most > LEAST * control else 0.0, control))
    return max(answers) if answers else None


def _by_row(recorder: Recorder, samples: int) -> list[Tensor | None]:
    """Each result as (samples, numbers)."""
    found: list[Tensor | None] = []
    for result in recorder.results():
        t = result.values
        fits = t.dim() >= 1 and t.numel() > 0 and t.shape[0] % samples == 0 and (t.shape[0] == samples or t.dim() == 2)
        found.append(t.double().reshape(samples, -1) if fits else None)
    return found
