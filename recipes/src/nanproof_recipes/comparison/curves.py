"""Curves of several arms on one axis, in bounded room: buckets as wide as the longest arm needs, and every value that is not
finite kept as a mark of its own. NaN is what such a comparison is about, so none of it gets lost in a bucket or behind a step
that was taken again."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from nanproof_recipes.comparison.comparison import Arm
from nanproof_recipes.library import Extent, one_line

STEP = "step"
ROOM = 20_000
"""Points of all curves together."""
MOST_POINTS = 1500
"""Of one curve."""
MOST_CHARTS = 12
TITLES = {
    "loss": "Loss",
    "grad_norm": "Gradient norm",
    "lr": "Learning rate",
    "learning_rate": "Learning rate",
    "scale": "Loss scale",
    "kl": "KL",
    "reward_std": "Reward deviation",
}
_LARGEST = 1e300


def charts(arms: Sequence[Arm]) -> dict[str, Any]:
    """A chart for every name of a curve, with a line for every arm that has it: as strict JSON holds it."""
    given = dict.fromkeys(
        key for arm in arms for key in arm.curves if key != STEP and any(x is not None for x in arm.curves[key])
    )
    names = sorted(given, key=_rank)[:MOST_CHARTS]
    pairs = sum(name in arm.curves for arm in arms for name in names)
    most = max(50, min(MOST_POINTS, ROOM // max(pairs, 1)))
    width = 1
    while any(len({x // width for x in _steps(arm)}) > most for arm in arms):
        width *= 2
    found = []
    for name in names:
        lines = [{"arm": i, **line} for i, arm in enumerate(arms) if (line := _line(arm, name, width))]
        if lines:
            found.append({"key": name, "title": _title(name), "lines": lines})
    return {"width": width, "charts": found, "left_out": [_title(name) for name in sorted(given, key=_rank)[MOST_CHARTS:]][:50]}


def _rank(name: str) -> int:
    """The loss, then other losses (the terms of it, and those of held-out data), then what is known by name, then the rest."""
    known = list(TITLES)
    if name not in known:
        return 1 if name.endswith("loss") else len(known) + 1
    return known.index(name) + (name != "loss")


def _title(name: str) -> str:
    """As a sentence begins; kl and mse stay as they are."""
    said = one_line(name, 60).replace("_", " ")
    return TITLES.get(name) or (said[:1].upper() + said[1:] if len(said) > 3 else said)


def _line(arm: Arm, name: str, width: int) -> dict[str, Any] | None:
    """One curve; None where nothing was logged."""
    if name not in arm.curves:
        return None
    points = [(step, float(x)) for step, x in zip(_steps(arm), arm.curves[name], strict=True) if x is not None]
    if not points:
        return None
    buckets = _buckets(points, width)
    places = sorted(buckets)
    extents = [buckets[place] for place in places]
    line: dict[str, Any] = {
        "x": [place * width for place in places],
        "mean": [_short(extent.mean) for extent in extents],
        "bad": _spans(points, width, MOST_POINTS),
        "count": len(points),
    }
    if width > 1:
        line |= {"low": [_short(e.low) for e in extents], "high": [_short(e.high) for e in extents]}
    return line


def _steps(arm: Arm) -> list[int]:
    if STEP in arm.curves:
        return [int(step) for step in arm.curves[STEP] if step is not None]
    return list(range(max((len(values) for values in arm.curves.values()), default=0)))


def _buckets(points: Sequence[tuple[int, float]], width: int) -> Mapping[int, Extent]:
    """The finite values. A step that comes again, after going back, takes the place of what was given up."""
    found: dict[int, Extent] = {}
    before = -1
    for step, x in points:
        if step <= before:
            for place in [place for place in found if place * width >= step]:
                del found[place]
        before = step
        found.setdefault(step // width, Extent()).add(x)
    return found


def _spans(points: Sequence[tuple[int, float]], width: int, most: int) -> list[list[Any]]:
    """[first step, last step, how many, "nan" or "inf"] of values in a row that are not finite. Where there are too many of
    these, the ones of a few buckets are told as one."""
    spans: list[list[Any]] = []
    before, open_ = -1, False
    for step, x in points:
        if math.isfinite(x):
            open_ = False
            continue
        kind = "nan" if x != x else "inf"
        if open_ and step > before and spans[-1][3] == kind:
            spans[-1][1:3] = [step, spans[-1][2] + 1]
        else:
            spans.append([step, step, 1, kind])
        before, open_ = step, True
    spans.sort(key=lambda span: (span[0], span[1]))
    while len(spans) > most:
        width *= 2
        merged: list[list[Any]] = []
        for first, last, count, kind in spans:
            if merged and merged[-1][0] // width == first // width:
                merged[-1][1:] = [
                    max(merged[-1][1], last),
                    merged[-1][2] + count,
                    "nan" if "nan" in (merged[-1][3], kind) else kind,
                ]
            else:
                merged.append([first, last, count, kind])
        spans = merged
    return spans


def _short(x: float) -> float | None:
    """Five digits, which is more than a screen shows."""
    return float(f"{min(max(x, -_LARGEST), _LARGEST):.5g}") if math.isfinite(x) else None
