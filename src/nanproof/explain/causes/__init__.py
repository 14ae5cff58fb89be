"""The catalogue, a file for each family of causes. Importing this package fills `Cause.catalogue`."""

from __future__ import annotations

from nanproof.explain.cause import Cause
from nanproof.explain.causes import backward, data, forward, learning, optimizer, rl, system, weights

__all__ = ["backward", "data", "fix_of", "forward", "learning", "optimizer", "rl", "system", "weights"]


def fix_of(slug: str) -> str | None:
    """What the catalogue says to do about a cause; None where it has none of that name."""
    return next((cause.fix for cause in Cause.catalogue if cause.slug == slug), None)
