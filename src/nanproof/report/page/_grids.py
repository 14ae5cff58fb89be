"""Heat maps for the page: at most about a hundred rows, each cell in two bytes."""

from __future__ import annotations

import base64
import math
import sys
from array import array
from typing import Any

from nanproof._records import ABSENT
from nanproof._text import one_line
from nanproof.report.folder._series import Heat

MOST_ROWS = 120
_ABSENT, _ZERO, _FIRST, _LAST, _NONFINITE = 0, 1, 2, 65534, 65535
"""Codes of a cell; from the second to the last but one they are the logarithm."""


def grid(heat: Heat) -> dict[str, Any] | None:
    """A heat map as the page has it: names of the rows, where columns begin, and the cells, one column after the other, as base64
    of two bytes each (the least significant first): 0 absent, 1 zero, 65535 non-finite, between them the logarithm. `absent` is
    how many cells are."""
    columns = heat.columns
    if not columns or not heat.names:
        return None
    labels, members = rows(heat.names)
    cells = [max([column[i] for i in group], default=ABSENT) for column in columns for group in members]
    logs = sorted(math.log10(x) for x in cells if 0 < x < math.inf)
    low, high = (logs[0], logs[-1]) if logs else (0.0, 0.0)
    unit = (_LAST - _FIRST) / (high - low) if high > low else 0.0
    codes = array("H", [_code(x, low, unit) for x in cells])
    if sys.byteorder == "big":
        codes.byteswap()
    return {
        "names": [one_line(label, 120) for label in labels],
        "absent": codes.count(_ABSENT),
        "grouped": len(labels) < len(heat.names),
        "all": len(heat.names),
        "steps": heat.steps,
        "width": heat.width,
        "low": round(low, 6),
        "high": round(high, 6),
        # Colours go from the lowest to the highest hundredth: one odd cell would leave all others in one colour.
        "from": round(logs[len(logs) // 100], 4) if logs else 0.0,
        "to": round(logs[-1 - len(logs) // 100], 4) if logs else 0.0,
        "cells": base64.b64encode(codes.tobytes()).decode("ascii"),
    }


def rows(names: list[str], most: int = MOST_ROWS) -> tuple[list[str], list[list[int]]]:
    """Labels of the rows, and which of the names each stands for. Names are put together by the module they are in, as far up as
    it takes; if that is not enough, those that follow each other are."""
    parts = [name.split(".") for name in names]
    for depth in range(max(map(len, parts), default=1), 0, -1):
        groups: dict[str, list[int]] = {}
        for i, part in enumerate(parts):
            groups.setdefault(".".join(part[:depth]), []).append(i)
        if len(groups) <= most:
            break
    labels = [f"{label} ({len(group)})" if len(group) > 1 else names[group[0]] for label, group in groups.items()]
    members = list(groups.values())
    if len(members) > most:
        each = -(-len(members) // most)
        starts = range(0, len(members), each)
        labels = [f"{one_line(labels[i], 40)} and {len(members[i : i + each]) - 1} more" for i in starts]
        members = [[name for group in members[i : i + each] for name in group] for i in starts]
    return labels, members


def _code(x: float, low: float, unit: float) -> int:
    if x == ABSENT or x < 0:
        return _ABSENT
    if x == 0:
        return _ZERO
    return _FIRST + round((math.log10(x) - low) * unit) if math.isfinite(x) else _NONFINITE
