"""A guard with the settings most tests use, and losses whose gradients go bad."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import nanproof
from toys import mse, net

NAN, INF = float("nan"), float("inf")


def guarded(model=None, optimizer=None, **kwargs):
    model = net() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if optimizer is None else optimizer
    return nanproof.Guard(model, optimizer, **{"loss_fn": mse, **kwargs})


def with_gradient(tensor, value):
    """The same tensor; on the way back one element of its gradient is `value`."""

    def change(gradient):
        gradient = gradient.clone()
        gradient.view(-1)[0] = value
        return gradient

    tensor.register_hook(change)
    return tensor


def gradient_fault(value, at=3):
    """A loss function whose loss is always finite, and whose gradient is bad for batches that carry a third element."""

    def loss_fn(model, batch):
        out = model(batch[0]).squeeze(-1)
        if len(batch) > at - 1:
            out = with_gradient(out, value)
        return F.mse_loss(out, batch[1])

    return loss_fn
