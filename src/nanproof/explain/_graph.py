"""What the autograd graph of a loss shows, read just before its backward.

The graph knows how the loss was made: which activation went into it, which shapes were broadcast, and the predictions and targets
that it keeps for backward. Reading it runs nothing and waits for no device. Behind torch.compile little of it is visible.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

NEAR_THE_LOSS = 256
"""Nodes of the graph that are looked through."""
ROWS = 256
"""Rows of predictions that are compared with each other."""
_ACTIVATIONS = {"Softmax": "softmax", "Sigmoid": "sigmoid"}
_OF_LOGITS = {"LogSoftmax": "log_softmax", "BinaryCrossEntropyWithLogits": "binary_cross_entropy_with_logits"}
_VIEWS = frozenset(
    "View UnsafeView ReshapeAlias Transpose Permute T Squeeze Unsqueeze Select Slice Index Expand ToCopy Clone Alias Split "
    "Unbind UpsampleBilinear2D UpsampleNearest2D UpsampleBicubic2D MaskedSelect AsStrided Movedim".split()
)
"""Nodes that move or copy numbers."""
_LOSSES = frozenset("MseLoss HuberLoss SmoothL1Loss".split())
_PAIRWISE = _LOSSES | frozenset("Sub Rsub Mul Div".split())
"""Nodes that combine predictions with targets, element by element."""


@dataclass(frozen=True, slots=True)
class Activated:
    """An activation whose output a loss takes for logits."""

    inner: str
    """What was applied: "softmax" or "sigmoid"."""
    outer: str
    """What applies it again: "log_softmax" or "binary_cross_entropy_with_logits"."""


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Predictions that a loss spreads over N x N pairs."""

    prediction: tuple[int, ...]
    result: tuple[int, ...]
    op: str
    """What combines predictions and targets: "mse_loss", "sub"."""


def nodes_of(loss: Tensor) -> list[Any]:
    """Return the nodes next to a loss, nearest first."""
    todo: list[Any] = [loss.grad_fn]
    found: list[Any] = []
    seen: set[Any] = {None}
    while todo and len(found) < NEAR_THE_LOSS:
        node = todo.pop(0)
        if node in seen:
            continue
        seen.add(node)
        found.append(node)
        todo += [below for below, _ in node.next_functions]
    return found


def name_of(node: Any) -> str:
    """Return the operation of a node: "Softmax" of SoftmaxBackward0."""
    return re.sub(r"Backward\d*$", "", node.name())


def is_added_up(loss: Tensor) -> bool:
    """Return whether a loss is a sum, seen through views and copies. True where the graph does not say what made it."""
    node = loss.grad_fn
    while node is not None and name_of(node) in _VIEWS:
        node = node.next_functions[0][0] if node.next_functions else None
    return node is None or isinstance(node, BackwardCFunction) or name_of(node) in ("Add", "Sum")


def targets_of(loss: Tensor) -> list[Tensor]:
    """Return the labels that a loss compares its logits with, as cross_entropy and nll_loss keep them for backward."""
    return [node._saved_target for node in nodes_of(loss) if name_of(node).startswith("NllLoss")]


def applied_twice(nodes: Sequence[Any]) -> Iterator[tuple[Activated, Any]]:
    """Yield each activation whose output goes into a loss that applies it itself, and its node."""
    for node in nodes:
        outer = _OF_LOGITS.get(name_of(node))
        below = node.next_functions[0][0] if outer and node.next_functions else None
        while below is not None and name_of(below) in _VIEWS and below.next_functions:
            below = below.next_functions[0][0]
        if outer and below is not None and (inner := _ACTIVATIONS.get(name_of(below))):
            yield Activated(inner, outer), below


def broadcast_in(nodes: Sequence[Any]) -> Broadcast | None:
    """Return where N predictions and N targets were combined into N x N numbers, because one of them has a dimension more."""
    for node in nodes:
        name = name_of(node)
        if name not in _PAIRWISE:
            continue
        result = _shape(node, 0) if name not in _LOSSES else None
        inputs = [(below, index) for below, index in node.next_functions if below is not None]
        if len(inputs) != 1:
            continue  # both sides depend on the weights: pairs are compared on purpose
        below, index = inputs[0]
        shape = _shape(below, index)
        if name not in _LOSSES and _pairs_up(below, index):
            continue
        if name_of(below) == "Expand" and below.next_functions and below.next_functions[0][0] is not None:
            result, shape = shape, _shape(*below.next_functions[0])
        if shape is None or result is None:
            continue
        few, many = [n for n in shape if n != 1], [n for n in result if n != 1]
        if few and many == [few[0], *few]:
            return Broadcast(shape, result, _snake(name))
    return None


def _pairs_up(node: Any, index: int) -> bool:
    """Whether the loss itself gives the predictions another dimension, as in `x[:, None] - y[None]`: every pair is meant."""
    while name_of(node) in _VIEWS and node.next_functions and node.next_functions[0][0] is not None:
        shape, (node, index) = _shape(node, index), node.next_functions[0]
        before = _shape(node, index)
        if shape is not None and before is not None and len(shape) > len(before) and math.prod(shape) == math.prod(before):
            return True
    return False


def _snake(name: str) -> str:
    """The name of an operation as it is written in Python: "smooth_l1_loss" of SmoothL1Loss."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _shape(node: Any, index: int) -> tuple[int, ...] | None:
    """Return the shape of what an operation gave."""
    known = getattr(node, "_input_metadata", ())
    return tuple(known[index].shape) if index < len(known) else None


def outputs_of(nodes: Sequence[Any]) -> Tensor | None:
    """Return, on the device, four numbers about the loss nearest to the end: how far apart the predictions of different samples
    are (of a regression, in deviations of its targets), the loss, the loss of the best constant prediction, and from how many
    targets for each class that is known. None where no such loss is known."""
    for node in nodes:
        name = name_of(node)
        if name in ("NllLoss", "NllLoss2D"):
            return _classes(node._saved_self.detach(), node._saved_target, node._saved_ignore_index)
        if name == "BinaryCrossEntropyWithLogits":
            return _binary(node._saved_self.detach(), node._saved_target.detach())
        if name == "MseLoss":
            return _regression(node._saved_self.detach(), node._saved_target.detach())
    return None


def _classes(log_probabilities: Tensor, target: Tensor, ignored: int) -> Tensor | None:
    if log_probabilities.dim() < 2 or len(log_probabilities) < 2:
        return None
    rows = log_probabilities.movedim(1, -1).flatten(0, -2)
    flat = target.flatten()
    counted = (flat >= 0) & (flat < rows.shape[1])
    if 0 <= ignored < rows.shape[1]:  # padding that is a class; a negative one may be read as a huge number
        counted &= flat != ignored
    share = torch.zeros(rows.shape[1], device=rows.device, dtype=torch.float32)
    share.scatter_add_(0, flat.clamp(0, rows.shape[1] - 1), counted.float())
    share = share / share.sum().clamp(min=1)
    trivial = -torch.special.xlogy(share, share).sum()
    rows_counted, present = counted.sum().clamp(min=1), (share > 0).sum()
    trivial = trivial + (present - 1) / (2 * rows_counted)  # of few samples the entropy comes out too low
    own = rows.gather(1, flat.clamp(0, rows.shape[1] - 1)[:, None])[:, 0].float()
    loss = -torch.where(counted, own, 0).sum() / rows_counted
    return torch.stack((_spread(rows), loss, trivial, rows_counted / present.clamp(min=1)))


def _binary(logits: Tensor, target: Tensor) -> Tensor | None:
    if not logits.dim() or len(logits) < 2:
        return None
    logits, target = logits.float(), target.float()
    share = target.mean()
    trivial = -(torch.special.xlogy(share, share) + torch.special.xlogy(1 - share, 1 - share))
    loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, target)
    return torch.stack((_spread(logits.reshape(len(logits), -1)), loss, trivial, torch.full_like(loss, logits.numel() / 2)))


def _regression(prediction: Tensor, target: Tensor) -> Tensor | None:
    if not prediction.dim() or len(prediction) < 2 or prediction.shape != target.shape:
        return None
    prediction, target = prediction.float(), target.float()
    trivial = target.reshape(len(target), -1).var(0, correction=0).mean()
    spread = _spread(prediction.reshape(len(target), -1)) / trivial.sqrt().clamp(min=1e-30)
    loss = torch.nn.functional.mse_loss(prediction, target)
    return torch.stack((spread, loss, trivial, torch.full_like(loss, len(target) / 2)))


def _spread(rows: Tensor) -> Tensor:
    some = rows[:: max(1, len(rows) // ROWS)].float()
    return (some.amax(0) - some.amin(0)).amax()
