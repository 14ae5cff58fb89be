"""A curve in the terminal: a few rows of block characters, and a cross where there is no number to draw."""

from __future__ import annotations

import math
from collections.abc import Sequence

BLOCKS = " ▁▂▃▄▅▆▇█×"
ASCII = " ..::||##x"
"""Nine heights and a cross, for terminals that know no more."""


def curve(values: Sequence[float], width: int, height: int, top: float, bottom: float, marks: str = BLOCKS) -> list[str]:
    """Rows of text, highest first, each `width` characters. A column of which most is not finite is a cross."""
    if not values:
        return [" " * width] * height
    columns = [
        values[i * len(values) // width : max((i + 1) * len(values) // width, i * len(values) // width + 1)] for i in range(width)
    ]
    rows = [[" "] * width for _ in range(height)]
    for x, column in enumerate(columns):
        finite = [y for y in column if math.isfinite(y)]
        if 2 * len(finite) < len(column) or not finite:
            rows[height - 1][x] = marks[9]
            continue
        share = (sum(finite) / len(finite) - bottom) / max(top - bottom, 1e-12)
        filled = round(min(max(share, 0.0), 1.0) * (8 * height - 1)) + 1
        for y in range(height):
            rows[height - 1 - y][x] = marks[min(max(filled - 8 * y, 0), 8)]
    return ["".join(row) for row in rows]
