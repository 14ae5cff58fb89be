"""Who wrote where: a step can be run again only if its batch is what it was, and its gradients are what backward left.

A loss may write into its batch, and a callback into the gradients. Nobody can ask for either a second time. How often a tensor
was written is known without a look at its numbers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from nanproof.core.tree import tensors_in


def writes_to_batch(batch: Any) -> list[int]:
    """How often each tensor of a batch was written so far."""
    return [tensor._version for _, tensor in tensors_in(batch) if not tensor.is_inference()]


def gradients_now(parameters: Iterable[Tensor]) -> list[tuple[int, int]]:
    """The gradients that are there: which, and how often they were written."""
    return [(id(p.grad), p.grad._version) for p in parameters if p.grad is not None]
