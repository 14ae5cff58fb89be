"""What the tests of probes share: run them on a model, and the causes that came out."""

from __future__ import annotations

import torch

from nanproof._preflight import examine


def probed(model, batch, loss_fn, accumulate=1, optimizer=None):
    """Everything that a preflight finds."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 1e-3)
    return examine(model, optimizer, batch, loss_fn, accumulate=accumulate)


def causes(*args, **kwargs):
    return [d.cause for d in probed(*args, **kwargs).found]
