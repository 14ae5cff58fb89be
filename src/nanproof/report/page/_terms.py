"""The terms of a loss, as the page and the texts show them: thinned out for a chart of their own, and in one line those that are
not finite first, because one of them made the loss so."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from nanproof._records import Incident, encode
from nanproof._text import one_line
from nanproof.report.folder._run import Run
from nanproof.report.folder._series import Extent

ROOM = 8000
"""Points of all terms together, and steps around incidents times terms."""
IN_A_LINE = 12
"""Terms that a line of text names."""
_LARGEST = 1e300

Terms = Sequence[tuple[str, float]]


def bad_first(terms: Terms) -> list[tuple[str, float]]:
    """Those that are not finite before the others, each in the order it came."""
    return sorted(terms, key=lambda term: math.isfinite(term[1]))


def of_incident(incident: Incident) -> list[tuple[str, float]]:
    """What the terms were at the step of an incident, the bad ones first."""
    return bad_first(incident.terms)


def chart(run: Run, near: Sequence[int]) -> dict[str, Any] | None:
    """What the chart is drawn of, as strict JSON holds it; None where the steps have no terms. `near` are the steps around
    incidents that are told one by one, the most important first."""
    curves = run.curves
    buckets = [bucket for bucket in curves if bucket.terms]
    names = [name for name in curves.terms if any(name in bucket.terms for bucket in buckets)]
    if not names:
        return None
    width = curves.width
    while len({bucket.start // width for bucket in buckets}) * len(names) > ROOM:
        width *= 2
    merged: dict[int, dict[str, Extent]] = {}
    for bucket in buckets:
        there = merged.setdefault(bucket.start // width, {})
        for name, extent in bucket.terms.items():
            there.setdefault(name, Extent()).merge(extent)
    places = sorted(merged)
    last = dict(run.newest.terms) if run.newest is not None else {}
    lines = [_line(name, [merged[place].get(name) for place in places], width > 1, last.get(name)) for name in names]
    found: dict[str, Any] = {"width": width, "steps": [place * width for place in places], "lines": lines}
    found["more"] = curves.more_terms
    if width > 1 and near:
        found["near"] = _near(run, sorted(near[: ROOM // len(names)]), names)
    return found


def _line(name: str, extents: Iterable[Extent | None], banded: bool, last: float | None) -> dict[str, Any]:
    each = [extent or Extent() for extent in extents]
    bad = [extent.bad for extent in each]
    line: dict[str, Any] = {"name": one_line(name, 80), "mean": [_short(extent.mean) for extent in each]}
    line |= {"bad": bad if any(bad) else [], "last": encode(last)}
    if banded:
        line |= {"low": [_short(extent.low) for extent in each], "high": [_short(extent.high) for extent in each]}
    return line


def _near(run: Run, steps: Sequence[int], names: Sequence[str]) -> dict[str, Any]:
    """Every step around incidents: `values` by term, null where there is no finite one, and where in `steps` it is bad."""
    told = [dict(run.near[step].terms) for step in steps]
    values = [[_short(terms.get(name, math.nan)) for terms in told] for name in names]
    bad = [[i for i, terms in enumerate(told) if name in terms and not math.isfinite(terms[name])] for name in names]
    return {"steps": list(steps), "values": values, "bad": bad}


def _short(x: float) -> float | None:
    """Five digits, which is more than a screen shows."""
    return float(f"{min(max(x, -_LARGEST), _LARGEST):.5g}") if math.isfinite(x) else None
