"""A model of thousands of small parameter tensors, and ways in which a step of it goes wrong.

What is done for each tensor and each operation shows here: a step of 5,000 tensors takes a fifth of a second on one core.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class Root(nn.Module):
    """Adds the root of a sum of squares. While `bad`, the sum is 0: the forward is finite and the slope is not."""

    def __init__(self) -> None:
        super().__init__()
        self.bad = False

    def forward(self, x: Tensor) -> Tensor:
        kept = x * (0.0 if self.bad else 1.0)
        return x + 1e-3 * (kept.square().sum(-1, keepdim=True) + (0.0 if self.bad else 1e-6)).sqrt()


class ManyTensors(nn.Module):
    """Small linear layers in a row, each added to what goes in; a `Root` in the middle."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(tensors // 2))
        self.root = Root()
        self.empty_mask = False
        """The loss divides by 0."""

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x + 0.01 * layer(x)
            if i == len(self.layers) // 2:
                x = self.root(x)
        return x


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    """The mean square of the outputs that a mask keeps."""
    each = model(batch).square().mean(-1)
    mask = torch.zeros_like(each) if model.empty_mask else torch.ones_like(each)
    return (each * mask).sum() / mask.sum()


@dataclass(frozen=True)
class Fault:
    """One way in which a step goes wrong, and what the diagnosis has to say about it."""

    spoil: Callable[[ManyTensors, Tensor], Tensor]
    """Spoils the model, or returns a spoiled batch."""
    cause: str
    op: str | None
    where: str
    verified: bool
    samples: tuple[int, ...] = ()


def _nan_in_batch(model: ManyTensors, batch: Tensor) -> Tensor:
    batch[1, 2] = float("nan")
    return batch


def _weight_overflows(model: ManyTensors, batch: Tensor) -> Tensor:
    with torch.no_grad():
        model.layers[len(model.layers) // 2].weight[0, 0] = 1e38
    return batch


def _batch_overflows(model: ManyTensors, batch: Tensor) -> Tensor:
    return batch * 1e30


def _root_of_zero(model: ManyTensors, batch: Tensor) -> Tensor:
    model.root.bad = True
    return batch


def _divides_by_zero(model: ManyTensors, batch: Tensor) -> Tensor:
    model.empty_mask = True
    return batch


FAULTS = {
    "NaN in the batch": Fault(_nan_in_batch, "nonfinite-batch", None, "batch", True, (1,)),
    "a weight of 1e38": Fault(_weight_overflows, "unknown", "pow", "root", False),
    "a batch of 1e30": Fault(_batch_overflows, "inputs-not-normalised", None, "batch", False),
    "root of 0, in the backward": Fault(_root_of_zero, "sqrt-at-zero", "sqrt", "root", True),
    "0 / 0 in the loss": Fault(_divides_by_zero, "zero-denominator", "div", "loss_fn", True),
}
