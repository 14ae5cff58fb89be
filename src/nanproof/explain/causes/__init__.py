"""The catalogue, a file for each family of causes. Importing this package fills `Cause.catalogue`."""

from __future__ import annotations

from nanproof.explain.causes import backward, data, forward, learning, optimizer, rl, system, weights

__all__ = ["backward", "data", "forward", "learning", "optimizer", "rl", "system", "weights"]
