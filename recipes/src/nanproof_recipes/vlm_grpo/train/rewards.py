"""What a reply is worth: how much of the caption it has, and how well its box or point meets the mask.

Both are numbers from 0 to 1 for any reply, so that no reward is ever not finite. The best reply has 2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nanproof_recipes.vlm_grpo.data.scenes import ASKS, CELL, GRID, Ask, Cells, Scene, covered

BEST = 2.0
"""The most that caption and place are worth together."""
_CELLS = frozenset(map(str, range(GRID)))
"""How a cell is written. What else `int` reads, or fails on, such as five thousand digits, is none."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A reply, taken apart."""

    words: tuple[str, ...]
    """Before the place."""
    ask: Ask | None
    """What kind of place it gives; None where it gives none that can be read."""
    place: tuple[int, ...] = ()


def parse(text: str) -> Reply:
    """Words up to "box" or "point", then as many cells as that needs; what follows is not read. Numbers outside of the grid, too
    few of them, or a box that ends before it begins are no place."""
    words = text.split()
    at = next((i for i, word in enumerate(words) if word in ASKS), None)
    if at is None:
        return Reply(tuple(words), None)
    ask, count = ("box", 4) if words[at] == "box" else ("point", 2)
    told = words[at + 1 : at + 1 + count]
    ok = len(told) == count and all(word in _CELLS for word in told)
    place = tuple(int(word) for word in told) if ok else ()
    if not ok or (ask == "box" and (place[0] > place[2] or place[1] > place[3])):
        return Reply(tuple(words[:at]), None)
    return Reply(tuple(words[:at]), "box" if ask == "box" else "point", place)


def token_f1(said: Sequence[str], right: Sequence[str]) -> float:
    """Harmonic mean of precision and recall over words, each counted as often as it is there."""
    common = sum((Counter(said) & Counter(right)).values())
    return 2 * common / (len(said) + len(right)) if common else 0.0


def box_of(mask: NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """The least box of pixels around a mask: left, top, and where right and bottom end."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def iou(box: Cells, mask: NDArray[np.bool_]) -> float:
    """Intersection over union of a box of cells and the least box around the mask, in pixels."""
    left, top, right, bottom = box[0] * CELL, box[1] * CELL, (box[2] + 1) * CELL, (box[3] + 1) * CELL
    other_left, other_top, other_right, other_bottom = box_of(mask)
    width = min(right, other_right) - max(left, other_left)
    height = min(bottom, other_bottom) - max(top, other_top)
    common = max(0, width) * max(0, height)
    both = (right - left) * (bottom - top) + (other_right - other_left) * (other_bottom - other_top)
    return common / (both - common)


def hits(point: tuple[int, int], mask: NDArray[np.bool_]) -> float:
    """The share of the point's cell that the mask covers, against that of the cell it covers most: small shapes fill no cell."""
    shares = covered(mask)
    return float(shares[point[1], point[0]] / shares.max())


def place_reward(text: str, scene: Scene) -> float:
    """IoU of a box, or how much of the point's cell is in the mask; 0 for no place, or for the other kind of place."""
    reply = parse(text)
    if reply.ask != scene.ask:
        return 0.0
    if reply.ask == "box":
        left, top, right, bottom = reply.place
        return iou((left, top, right, bottom), scene.mask)
    return hits((reply.place[0], reply.place[1]), scene.mask)


def caption_reward(text: str, scene: Scene) -> float:
    """Token-F1 of the words before the place."""
    return token_f1(parse(text).words, scene.caption.split())


def reward(text: str, scene: Scene) -> float:
    """Caption and place."""
    return caption_reward(text, scene) + place_reward(text, scene)
