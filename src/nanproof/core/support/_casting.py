"""Weights that change their dtype and stay the same objects: optimizers, ties and hooks know them by identity.

What a user calls before training (`nanproof.numerics.precision.cast_trainable`) and what a living run does to itself (the remedy
`fp32-weights`) is this one thing.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from nanproof.core.judge._parameters import unwrap

HALF = (torch.float16, torch.bfloat16)


def buffers_beside(model: nn.Module, parameters: Iterable[Tensor]) -> list[Tensor]:
    """Half-precision buffers of the modules that own one of these parameters: running statistics go with their weights."""
    wanted = {id(p) for p in parameters}
    owners = [m for m in unwrap(model).modules() if any(id(p) in wanted for p in m._parameters.values())]
    found = {id(b): b for m in owners for b in m._buffers.values() if b is not None and b.dtype in HALF}
    return list(found.values())


def cast(tensor: Tensor, dtype: torch.dtype, *optimizers: torch.optim.Optimizer) -> None:
    """The tensor in another dtype, in place; its gradient, and what optimizers keep of it, too. Counters (0-d) stay."""
    was, gradient = tensor.dtype, tensor.grad
    tensor.grad = None  # a gradient and its weight have one dtype at any time
    tensor.data = tensor.data.to(dtype)
    if gradient is not None:
        tensor.grad = gradient.to(dtype)
    for optimizer in optimizers:
        state = optimizer.state.get(tensor, {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.dim() and value.dtype == was:
                state[key] = value.to(dtype)
