"""What is to be seen of one loss: its terms, and its samples one by one. Looked at on the device, read only where it matters.

A loss of NaN does not say which of its terms was NaN, nor which sample. Both are there when the loss is made, and gone later. So
a few numbers are kept of every micro-batch, on the device: reading them costs a wait, and a healthy step is not worth one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from nanproof._wording import bad_terms, few
from nanproof.core._under_way import Remark
from nanproof.core.judge._parameters import is_dtensor, unwrap
from nanproof.numerics.losses import supervised_tokens


@dataclass(frozen=True, slots=True)
class Facts:
    """What was seen of a micro-batch, as the host reads it."""

    terms: dict[str, float]
    """The loss, and what the model returned besides it that is called a loss."""
    tokens: tuple[int, ...] = ()
    """Supervised tokens of each sample; empty where there are no labels to count."""
    outside: tuple[int, ...] = ()
    """Labels of each sample that are not in the vocabulary."""
    wild: tuple[int, ...] = ()
    """Supervised tokens of each sample whose logits are not finite (-Inf at some ids is a ban, and fine); empty where the model
    returned no logits."""

    @property
    def bad(self) -> bool:
        """The loss or a term of it is no number, or was made of labels that do not exist."""
        return any(self.outside) or not all(map(math.isfinite, self.terms.values()))

    @property
    def without(self) -> list[int]:
        """Samples without a supervised token."""
        return [i for i, tokens in enumerate(self.tokens) if not tokens]

    def remark(self) -> Remark:
        """What the incident of its step should say."""
        named = any(not math.isfinite(x) for name, x in self.terms.items() if name != "loss")
        return Remark(self.said(alone=False), names_terms=named)

    def said(self, alone: bool) -> str:
        """In words, without a full stop; empty if nothing is wrong. `alone`: nobody else says what the loss is."""
        terms = bad_terms((name, x) for name, x in self.terms.items() if name != "loss")
        parts: list[str] = []
        if alone and not math.isfinite(self.terms["loss"]):
            parts.append(f"the loss is {self.terms['loss']:g}")
        if terms:
            parts.append(terms)
        if self.without:
            some = f"{len(self.without)} of {len(self.tokens)} samples" if len(self.without) < len(self.tokens) else "no sample"
            has = "have no supervised token" if len(self.without) < len(self.tokens) else "has a supervised token"
            parts.append(f"{some} {has} ({few(self.without, 10)})")
        if any(self.outside):
            parts.append(f"labels out of range in {_samples([i for i, n in enumerate(self.outside) if n])}")
        if any(self.wild):
            parts.append(f"logits that are not finite in {_samples([i for i, n in enumerate(self.wild) if n])}")
        return ", ".join(parts)


def _samples(indices: Sequence[int]) -> str:
    return f"sample{'s' if len(indices) > 1 else ''} {few(indices, 10)}"


@dataclass(frozen=True, slots=True)
class LossCheck:
    """The same on the device, as one short vector."""

    step: int
    names: tuple[str, ...]
    samples: int
    """How many there are; 0 where there are no labels to count."""
    vector: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, step: int, loss: Tensor, outputs: Any, labels: Tensor | None, size: int | None, shift: bool) -> LossCheck:
        """Nothing here waits. `size`: of the vocabulary, where it is known; else the logits say it."""
        terms = {"loss": loss, **dict(_terms(outputs))}
        parts = [torch.stack([t.detach().float().sum().to(loss.device, non_blocking=True) for t in terms.values()])]
        if labels is not None:
            logits = _logits(outputs, labels)
            size = logits.shape[-1] if logits is not None else size
            parts += [part.float().to(loss.device, non_blocking=True) for part in _by_sample(labels, logits, size, shift)]
        return cls(step, tuple(terms), 0 if labels is None else len(labels), torch.cat(parts))

    def facts(self, values: Sequence[float]) -> Facts:
        terms, rest = len(self.names), list(values[len(self.names) :])
        tokens, outside = rest[: self.samples], rest[self.samples : 2 * self.samples]
        return Facts(
            dict(zip(self.names, values[:terms], strict=True)),
            tuple(map(int, tokens)),
            tuple(map(int, outside)),
            tuple(map(int, rest[2 * self.samples :])),
        )

    def read(self) -> Facts:
        """Waits for the device."""
        return self.facts(self.vector.tolist())


def read_all(checks: Sequence[LossCheck]) -> Iterator[tuple[LossCheck, Facts]]:
    """Many of them in one read."""
    if not checks:
        return
    values = torch.cat([check.vector for check in checks]).tolist()
    for check in checks:
        size = len(check.vector)
        yield check, check.facts(values[:size])
        values = values[size:]


def labels_of(inputs: Any) -> Tensor | None:
    """The labels of a batch, if they are token ids or classes."""
    labels = inputs.get("labels") if isinstance(inputs, Mapping) else None
    if not isinstance(labels, Tensor) or labels.dim() == 0 or labels.is_floating_point() or labels.dtype == torch.bool:
        return None
    return labels


def out_of_range(labels: Tensor, size: int, ignore_index: int = -100) -> Tensor:
    """Which labels are neither ignored nor ids of the vocabulary."""
    return (labels != ignore_index) & ((labels < 0) | (labels >= size))


def vocabulary(model: nn.Module) -> int | None:
    """How many ids the model's head knows; None where that cannot be told before the forward."""
    ask = getattr(unwrap(model), "get_output_embeddings", None)
    try:
        weight = getattr(ask(), "weight", None) if ask is not None else None
    except (AttributeError, NotImplementedError):
        return None
    return len(weight) if isinstance(weight, Tensor) and weight.dim() == 2 and len(weight) > 1 else None


def shifts_labels(model: nn.Module) -> bool:
    """Whether the loss compares the logits at a token with the label of the next one. Where that is not known: no."""
    inner: Any = unwrap(model)
    if hasattr(inner, "get_base_model"):  # PEFT
        inner = inner.get_base_model()
    return getattr(inner, "loss_type", None) == "ForCausalLM" or type(inner).__name__.endswith(("ForCausalLM", "LMHeadModel"))


def _terms(outputs: Any) -> Iterator[tuple[str, Tensor]]:
    """What else is called a loss among the outputs, also in a dictionary of them."""
    for key, value in outputs.items() if isinstance(outputs, Mapping) else ():
        if "loss" not in str(key) or key == "loss":
            continue
        if isinstance(value, Mapping):
            yield from ((f"{key}.{name}", part) for name, part in value.items() if _is_number(part))
        elif _is_number(value):
            yield str(key), value


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point() and not is_dtensor(value)


def _logits(outputs: Any, labels: Tensor) -> Tensor | None:
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
    if not isinstance(logits, Tensor) or is_dtensor(logits) or logits.shape[:-1] != labels.shape or not logits.numel():
        return None
    return logits if logits.is_floating_point() else None


def _by_sample(labels: Tensor, logits: Tensor | None, size: int | None, shift: bool) -> Iterator[Tensor]:
    """One number a sample: supervised tokens, labels out of range, and, with logits, tokens where those are not finite."""
    rows = labels.reshape(len(labels), -1)
    shift = shift and labels.dim() == 2
    yield supervised_tokens(rows, shift=shift)
    yield torch.zeros_like(rows[:, 0]) if size is None else out_of_range(rows, size).sum(1)
    if logits is not None:
        counts = pad(rows[:, 1:], (0, 1), value=-100) if shift else rows
        largest = logits.amax(-1).reshape(rows.shape).to(rows.device, non_blocking=True)
        yield ((counts != -100) & ~torch.isfinite(largest)).sum(1)
