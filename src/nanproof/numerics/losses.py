"""Losses over what counts: the cross entropy over supervised tokens, and the check that there are any; the mean square over
what a mask keeps; and the sum of several terms that can still be told apart (`weighted_sum`).

Three things go wrong with the usual way of writing them. A mean of means weights the tokens of short micro-batches more. A batch
in which nothing counts is 0/0. And a number that is not finite, at a position that does not count, turns the gradient into NaN
(0 * NaN) although the value looks fine. Here the sum over supervised tokens is divided by the number of them in the whole step,
the empty batch is named, and positions that do not count are left out of value and gradient. At those that do count nothing is
hidden: what is not finite there stays not finite.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from nanproof._errors import UsageError
from nanproof._wording import few
from nanproof.core.judge._terms import weighted_sum

__all__ = ["Supervision", "check_supervised", "masked_cross_entropy", "masked_mse", "supervised_tokens", "weighted_sum"]

_CHUNK = 2**24
"""Elements of logits that are widened at a time."""
Empty = Literal["raise", "refuse", "neutral"]


def masked_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    num_items: int | Tensor | None = None,
    shift: bool = True,
    ignore_index: int = -100,
    empty: Empty = "raise",
    label_smoothing: float = 0.0,
) -> Tensor:
    """The cross entropy over the tokens whose label is not `ignore_index`, in fp32 at least: their sum, over `num_items`.

    Under accumulation give every micro-batch the same `num_items`: the losses then add up to the mean over the whole step, and so
    do the gradients. No fp32 copy of the logits is kept for backward: softmax is computed again there, a piece at a time. All
    rows are computed, also those that do not count: to leave them out first, the device would have to be asked how many remain.

    Args:
        logits: `[..., tokens, vocabulary]`, or `[..., classes]` with `shift=False`.
        labels: `[..., tokens]`, token ids.
        num_items: supervised tokens of the whole step, all micro-batches together; None: those of this batch.
        shift: the logits at a token are for the label of the next one, as in causal language models; the first label is not used.
        ignore_index: the label of positions that do not count.
        empty: what a mean over nothing is (no supervised token in the step). "raise": a `UsageError`; one read waits for the
            device, and finds labels out of range too. "refuse": 0/0, which is NaN in value and gradient, and does not wait: a
            guard refuses the step. "neutral": exactly 0, with gradients of exactly 0.
        label_smoothing: the share of the target that is spread over the whole vocabulary.

    A label out of range is a `UsageError` on a CPU, and wherever `empty="raise"`. Else, on a device, nobody is asked: the loss is
    NaN then, and no assertion on the device ends the process.
    """
    labels = _checked(logits, labels, num_items, empty, label_smoothing)
    if shift:  # the labels move, not the logits: slicing those would copy them
        labels = pad(labels[..., 1:], (0, 1), value=ignore_index)
    keep = labels != ignore_index
    outside = keep & ((labels < 0) | (labels >= logits.shape[-1]))
    found = keep.sum()
    divisor = found if num_items is None else _on(num_items, found.device)
    if empty == "raise" or labels.device.type == "cpu":
        _look(labels, outside, found, divisor, logits.shape[-1], empty)
    total: Tensor = _Sum.apply(logits.flatten(0, -2), labels.flatten(), keep.flatten(), outside.flatten(), label_smoothing)
    if empty == "neutral":
        divisor = torch.where((found == 0) & (divisor == 0), 1, divisor)
    return total / divisor


def masked_mse(prediction: Tensor, target: Tensor, mask: Tensor | None = None, *, empty: Empty = "raise") -> Tensor:
    """The mean of the squared differences where the mask is true, in fp32 at least: their sum, over the number of elements that
    count. Elsewhere nothing takes part, neither in the value nor in the gradient, whatever number stands there. What is not
    finite where the mask is true stays not finite.

    Args:
        prediction: of any shape, floating point.
        target: of the same shape.
        mask: bool, of the shape of the prediction or of its first dimensions: `[batch]` and `[batch, tokens]` fit
            `[batch, tokens, width]`; a size of 1 fits any. None: everything counts.
        empty: what a mean over nothing is (the mask is nowhere true). "raise": a `UsageError`; one read waits for the device.
            "refuse": 0/0, which is NaN in value and gradient, and does not wait: a guard refuses the step. "neutral": exactly
            0, with gradients of exactly 0.
    """
    keep = _mask(prediction, target, mask, empty)
    found = keep.sum() * (prediction.numel() // max(keep.numel(), 1))
    if empty == "raise" and (mask is not None or not prediction.numel()) and not int(found):
        raise UsageError(
            f"masked_mse: the mask is nowhere true over prediction {list(prediction.shape)}: the mean is 0/0. Leave such batches "
            'out, or choose empty="refuse" under a guard, empty="neutral" if they may be there'
        )
    # Over nothing, all of it is divided by NaN: the gradient has to be NaN too, for ranks with other data to learn of it.
    nothing = found == 0
    keep = keep if empty == "neutral" else keep | nothing
    wide = torch.float64 if torch.float64 in (prediction.dtype, target.dtype) else torch.float32
    divisor = torch.where(nothing, 1.0 if empty == "neutral" else torch.nan, found.to(wide))
    difference = torch.where(keep, prediction, 0).to(wide) - torch.where(keep, target, 0).to(wide)
    return (difference * difference).sum() / divisor


def supervised_tokens(labels: Tensor, ignore_index: int = -100, shift: bool = True) -> Tensor:
    """How many tokens of each sample are supervised, on the device. With `shift` the first token's label never counts: no logits
    come before it."""
    return (labels[..., 1:] != ignore_index).sum(-1) if shift else (labels != ignore_index).sum(-1)


@dataclass(frozen=True, slots=True)
class Supervision:
    """How much of a dataset is supervised."""

    samples: int
    tokens: int
    """Supervised tokens of all samples."""
    least: int
    """Supervised tokens of the sample that has the fewest."""
    most: int
    share: float
    """Supervised tokens over all tokens that have a label."""

    def __str__(self) -> str:
        return f"{self.samples} samples, {self.tokens} supervised tokens ({self.share:.0%}), {self.least} to {self.most} a sample"


def check_supervised(
    dataset: Iterable[Any],
    *,
    ignore_index: int = -100,
    labels: str = "labels",
    shift: bool = True,
    limit: int | None = None,
) -> Supervision:
    """Look at every sample before training: `UsageError` names those without a supervised token. A batch of them has the loss
    0/0; among others they cost time and teach nothing. The usual reasons are a prompt that fills `max_length`, so that the answer
    is cut off, and a template that the masking did not find.

    Args:
        dataset: samples as mappings that hold their labels as a list, an array or a tensor. What a collator masks later is not
            seen here: give it the samples as the loss gets them.
        labels: the key of the labels.
        shift: as in `masked_cross_entropy`.
        limit: look at the first so many only; needed where the dataset has no length.
    """
    if limit is None and not isinstance(dataset, Sized):
        raise UsageError(f"check_supervised({type(dataset).__name__}): it has no length; say how many samples to look at, limit=")
    counts: list[int] = []
    positions = 0
    for i, row in enumerate(islice(_only(dataset, labels), limit)):
        given = _labels_of(row, labels, i, shift)
        counts.append(int(supervised_tokens(given, ignore_index, shift).sum()))
        positions += (given[..., 1:] if shift else given).numel()
    if not counts:
        raise UsageError(f"check_supervised({type(dataset).__name__}): there is no sample in it")
    bad = [i for i, tokens in enumerate(counts) if tokens == 0]
    if bad:
        raise UsageError(
            f"check_supervised: {len(bad)} of {len(counts)} samples have no supervised token: {few(bad, 10)}. Every label of "
            f"theirs is {ignore_index}{' (the first one is never used)' if shift else ''}: the mean over nothing is 0/0. Leave "
            "them out, or raise max_length so that the answer is not cut off"
        )
    return Supervision(len(counts), sum(counts), min(counts), max(counts), sum(counts) / max(positions, 1))


def _only(dataset: Iterable[Any], labels: str) -> Iterator[Any]:
    """The column alone where the dataset can give it: decoding the others takes longer than counting."""
    columns = getattr(dataset, "column_names", None)
    if isinstance(columns, list) and labels in columns and hasattr(dataset, "select_columns"):
        dataset = dataset.select_columns([labels])
    if hasattr(dataset, "__iter__"):
        return iter(dataset)
    # A dataset of torch needs no __iter__, and its __getitem__ may not raise IndexError at the end.
    there: Any = dataset
    return (there[i] for i in (range(len(there)) if isinstance(there, Sized) else count()))


def _labels_of(row: Any, labels: str, i: int, shift: bool) -> Tensor:
    if not isinstance(row, Mapping) or labels not in row:
        has = f"the keys {sorted(map(str, row))}" if isinstance(row, Mapping) else f"the type {type(row).__name__}"
        raise UsageError(f"check_supervised: sample {i} has no {labels!r}, it has {has}; say which key holds the labels, labels=")
    try:
        found = torch.as_tensor(row[labels])
    except (TypeError, ValueError, RuntimeError) as error:
        raise UsageError(f"check_supervised: the labels of sample {i} are no list of numbers: {error}") from error
    if found.dim() == 0 and shift:
        raise UsageError(f"check_supervised: the label of sample {i} is one number, not one a token; pass shift=False")
    return found


def _checked(logits: Tensor, labels: Tensor, num_items: int | Tensor | None, empty: str, smoothing: float) -> Tensor:
    """The labels, next to the logits; what is wrong with the call itself is said here."""
    where = "masked_cross_entropy"
    if logits.dim() < 2 or labels.shape != logits.shape[:-1]:
        raise UsageError(
            f"{where}: labels {list(labels.shape)} do not fit logits {list(logits.shape)}; labels have the shape of the logits "
            "without the last dimension, before any shift"
        )
    if not logits.is_floating_point() or labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise UsageError(f"{where}: logits {logits.dtype} and labels {labels.dtype}; floating point and integers are needed")
    if empty not in ("raise", "refuse", "neutral"):
        raise UsageError(f'{where}(empty={empty!r}): "raise", "refuse" or "neutral" is needed')
    if not 0 <= smoothing < 1:
        raise UsageError(f"{where}(label_smoothing={smoothing!r}): a number from 0 to below 1 is needed")
    if isinstance(num_items, Tensor):
        if num_items.numel() != 1:
            raise UsageError(f"{where}: num_items has the shape {list(num_items.shape)}; one number is needed")
    elif num_items is not None and num_items < 0:
        raise UsageError(f"{where}(num_items={num_items}): the number of supervised tokens of the step is needed")
    return labels.long().to(logits.device, non_blocking=logits.device.type == "cuda")


def _mask(prediction: Tensor, target: Tensor, mask: Tensor | None, empty: str) -> Tensor:
    """What counts, next to the prediction, with as many dimensions; what is wrong with the call is said here."""
    where = "masked_mse"
    if not prediction.is_floating_point() or target.is_complex() or target.dtype == torch.bool:
        raise UsageError(f"{where}: prediction {prediction.dtype} and target {target.dtype}; floating point is needed")
    if target.shape != prediction.shape:
        raise UsageError(
            f"{where}: target {list(target.shape)} does not fit prediction {list(prediction.shape)}; the same shape is needed: "
            "broadcasting would take a mean over pairs that do not belong together"
        )
    if target.device != prediction.device:
        raise UsageError(f"{where}: target is on {target.device} and prediction on {prediction.device}; one device is needed")
    if empty not in ("raise", "refuse", "neutral"):
        raise UsageError(f'{where}(empty={empty!r}): "raise", "refuse" or "neutral" is needed')
    if mask is None:
        return torch.ones([1] * prediction.dim(), dtype=torch.bool, device=prediction.device)
    if mask.dtype != torch.bool:
        raise UsageError(f"{where}: the mask is {mask.dtype}; bool is needed: mask != 0")
    pairs = zip(mask.shape, prediction.shape, strict=False)
    if mask.dim() > prediction.dim() or any(size not in (1, whole) for size, whole in pairs):
        raise UsageError(
            f"{where}: the mask {list(mask.shape)} does not fit prediction {list(prediction.shape)}; it has the shape of the "
            "prediction, or of its first dimensions"
        )
    mask = mask.to(prediction.device, non_blocking=prediction.device.type == "cuda")
    return mask.reshape(*mask.shape, *[1] * (prediction.dim() - mask.dim()))


def _on(number: int | Tensor, device: torch.device) -> Tensor:
    """A number on the device. Filled in there: copying a plain number would wait."""
    if isinstance(number, Tensor):
        return number.reshape(()).to(device, non_blocking=device.type == "cuda")
    return torch.full((), number, device=device)


def _look(labels: Tensor, outside: Tensor, found: Tensor, divisor: Tensor, size: int, empty: str) -> None:
    """One read: is a label out of range, and is there anything to take the mean over?"""
    wrong, tokens, divided_by = torch.stack((outside.sum(), found, divisor.to(found.dtype))).tolist()
    if wrong:
        first = tuple(int(i) for i in torch.nonzero(outside)[0])
        rows = sorted({int(i) for i in torch.nonzero(outside)[:, 0]})
        raise UsageError(
            f"masked_cross_entropy: {wrong} labels are not below {size}, the size of the vocabulary, nor the ignored index: "
            f"{int(labels[first])} in sample {first[0]}; samples {few(rows, 10)}. Check the tokenizer against the model"
        )
    if empty == "raise" and divided_by == 0:
        said = f"none of {len(labels)} samples ({few(range(len(labels)), 10)}) has a supervised token"
        if tokens:
            said = f"num_items is 0, but {tokens} tokens are supervised"
        raise UsageError(
            f"masked_cross_entropy: {said}: the mean is 0/0. Leave such samples out (check_supervised names them), or choose "
            'empty="refuse" under a guard, empty="neutral" if they may be there'
        )


class _Sum(torch.autograd.Function):
    """The sum of the cross entropies of the rows that are kept. Keeps the logits themselves and one number a row for backward."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, keep: Tensor, outside: Tensor, smoothing: float) -> Tensor:
        wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
        index = torch.where(keep & ~outside, labels, 0)
        norms = torch.empty(len(logits), dtype=wide, device=logits.device)
        total = torch.zeros((), dtype=wide, device=logits.device)
        for rows in _pieces(logits):
            x = logits[rows].to(wide)
            norms[rows] = torch.logsumexp(x, -1)
            loss = norms[rows] - (1 - smoothing) * x.gather(1, index[rows, None]).squeeze(1)
            if smoothing:
                loss = loss - smoothing * x.mean(-1)
            loss = loss.masked_fill(outside[rows], torch.nan)
            total = total + torch.where(keep[rows], loss, 0.0).sum()
        ctx.save_for_backward(logits, index, keep, outside, norms)
        ctx.smoothing = smoothing
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        logits, index, keep, outside, norms = ctx.saved_tensors
        found = torch.empty_like(logits)
        # Rows that do not count get exactly 0. Where none counts and the loss is 0/0, NaN: ranks with other data learn of it.
        left_out = torch.where(keep.any(), torch.zeros_like(gradient), gradient * 0)
        for rows in _pieces(logits):
            piece = (logits[rows].to(norms.dtype) - norms[rows, None]).exp_()
            column = index[rows, None]
            piece.scatter_(1, column, piece.gather(1, column) - (1 - ctx.smoothing))
            if ctx.smoothing:
                piece -= ctx.smoothing / logits.shape[1]
            piece *= gradient
            piece.masked_fill_(outside[rows, None], torch.nan)
            found[rows] = torch.where(keep[rows, None], piece, left_out).to(found.dtype)
        return found, None, None, None, None


def _pieces(logits: Tensor) -> Iterator[slice]:
    step = max(_CHUNK // max(logits.shape[1], 1), 1)
    return (slice(start, start + step) for start in range(0, len(logits), step))
