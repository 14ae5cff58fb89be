"""The catalogue of causes, one file a family. Importing this package fills `Cause.catalogue`.

An entry has a `slug`, a `fix`, and `match(case)`, which returns evidence and a trial of the fix: see `explain/_cause.py`.

- `_data`, `_weights`, `_forward`, `_backward`, `_raised`, `_algebra`, `_objective`, `_update`, `_optimizer`, `_learning`, `_rl`,
  `_system`: where the cause lies.
"""

from __future__ import annotations

from nanproof.explain._cause import Cause
from nanproof.explain.causes import (
    _algebra,
    _backward,
    _data,
    _forward,
    _learning,
    _objective,
    _optimizer,
    _raised,
    _rl,
    _system,
    _update,
    _weights,
)

__all__ = ["Cause", "fix_of"]
_FAMILIES = (_data, _weights, _forward, _backward, _raised, _algebra, _objective, _update, _optimizer, _learning, _rl, _system)


def fix_of(slug: str) -> str | None:
    """Return the catalogue's fix for a cause, or None if it has no such cause."""
    return next((cause.fix for cause in Cause.catalogue if cause.slug == slug), None)
