"""Crosses of parameters that are too many for every run: a part that meets every pair stays quick, the rest is slow."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest


def part_of(*axes: Any, every: int) -> list[Any]:
    """Return all combinations; those whose positions do not add up to a multiple of `every` are marked slow.

    If every axis has at least `every` values, the quick ones still pair each value with each value of every other axis.
    """
    found = []
    for chosen in product(*map(enumerate, axes)):
        quick = sum(at for at, _ in chosen) % every == 0
        values = [value for _, value in chosen]
        found.append(pytest.param(*values, marks=() if quick else pytest.mark.slow, id="-".join(map(str, values))))
    return found
