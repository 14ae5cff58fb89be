"""The curves of one run, above each other, as rows of text: how much height each gets, their labels, and one axis for all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nanproof.watch._plot import Marks, Part, axis, chart, scale, short
from nanproof.watch._runs import View
from nanproof.watch._words import marked, said, told_terms

TITLES = {"loss": "loss", "grad_norm": "gradient norm", "lr": "learning rate", "scale": "loss scale"}
_SHARES = {"loss": 4, "grad_norm": 3, "lr": 1, "scale": 1}
_LEAST = {"loss": 3, "grad_norm": 3, "lr": 2, "scale": 2}
NARROWEST = 10
"""Steps that are shown at least; in a long run, buckets of steps."""


@dataclass(frozen=True, slots=True)
class Window:
    """Which steps are shown: all, or a number of them that end at the newest or where somebody stopped."""

    steps: float | None = None
    end: float | None = None
    """None follows the newest step."""

    def span(self, view: View) -> tuple[float, float]:
        first, last = _extent(view)
        if self.steps is None:
            return first, last
        end = last if self.end is None else min(self.end, last)
        return end - self.steps, end

    def zoomed(self, factor: float, view: View) -> Window:
        """More or fewer steps: around the middle, or with the newest at the end if that is followed."""
        first, last = _extent(view)
        start, end = self.span(view)
        loss = view.series.get("loss")
        steps = max((end - start) * factor, NARROWEST * (loss.width if loss else 1))
        if steps >= last - first:
            return Window()
        if self.end is None:
            return Window(steps)
        return Window(steps, min(max((start + end) / 2 + steps / 2, first + steps), last))

    def moved(self, share: float, view: View) -> Window:
        """By a share of what is shown; at the newest step it follows again."""
        if self.steps is None:
            return self
        first, last = _extent(view)
        end = self.span(view)[1] + share * self.steps
        return Window(self.steps, None if end >= last else max(end, first + self.steps))

    def held(self, view: View) -> Window:
        """Stops following, or follows again."""
        start, end = self.span(view)
        return Window(self.steps, None) if self.end is not None else Window(end - start, end)


def _extent(view: View) -> tuple[float, float]:
    loss = view.series.get("loss")
    first = loss.steps[0] if loss and loss.steps else 0
    return float(first), float(max(view.last_step, first + NARROWEST))


def shown_metrics(view: View) -> list[str]:
    """Those of which there is anything."""
    return [
        m for m in TITLES if (s := view.series.get(m)) and any(low == low or bad for low, bad in zip(s.low, s.bad, strict=True))
    ]


def heights(metrics: Sequence[str], rows: int) -> dict[str, int]:
    """Rows of each curve, without its title; as many curves as fit, the first ones first."""
    chosen: dict[str, int] = {}
    left = rows
    for metric in metrics:
        if left < _LEAST[metric] + 1:
            break
        chosen[metric] = _LEAST[metric]
        left -= _LEAST[metric] + 1
    while chosen and left > 0:
        least = min(chosen, key=lambda metric: chosen[metric] / _SHARES[metric])
        chosen[least] += 1
        left -= 1
    return chosen


def drawn(view: View, columns: int, rows: int, window: Window, how: str, only: str | None, marks: Marks) -> list[list[Part]]:
    """All rows. `how` is "auto", "log" or "linear"; `only` names one metric that gets all the room."""
    gutter = 9 if columns >= 50 else 8
    wide = columns - gutter - 1
    metrics = [m for m in shown_metrics(view) if only in (None, m)] or shown_metrics(view)
    if wide < 8 or rows < 4 or not metrics:
        return []
    span = window.span(view)
    lines: list[list[Part]] = []
    for metric, height in heights(metrics, rows - 2).items():
        series = view.series[metric]
        fits = scale(series.finite(*span), how if metric != "lr" else "linear")
        value = {"loss": view.loss, "grad_norm": view.grad_norm, "lr": view.lr, "scale": view.scale}[metric]
        head: list[Part] = [(" " * gutter + TITLES[metric], "strong"), (f"  {short(value)}", "value")]
        head.append(("  log" if fits and fits.log else "", "label"))
        lines.append([*head, *(_terms(view, columns - _width(head), marks) if metric == "loss" else [])])
        if fits is None:
            empty: list[Part] = [(" " * (gutter - 1) + marks.side, "axis"), ("no number here", "cross")]
            lines += [empty] + [[(" " * (gutter - 1) + marks.side, "axis")]] * (height - 1)
            continue
        labels = {0: fits.top, height - 1: fits.bottom}
        if height >= 7:
            labels[(height - 1) // 2] = fits.at(1 - ((height - 1) // 2 + 0.5) / height)
        for i, row in enumerate(chart(series, span, wide, height, fits, marks)):
            label = short(labels[i]) if i in labels else ""
            lines.append([(label[: gutter - 1].rjust(gutter - 1), "label"), (marks.side, "axis"), *row])
    line, steps = axis(span, wide, marked(view), marks)
    lines.append([(" " * (gutter - 1) + marks.corner, "axis"), *line])
    lines.append([(" " * gutter, ""), *steps])
    return lines


def _terms(view: View, room: int, marks: Marks) -> list[Part]:
    """The newest value of each term of the loss, as many as there is room for."""
    parts: list[Part] = []
    for (_, x), text in zip(view.terms, told_terms(view.terms, len(view.terms)), strict=True):
        part = (f"  {said(text, marks.ascii)}", "label" if math.isfinite(x) else "cross")
        room -= _width([part])
        if room < 0:
            break
        parts.append(part)
    return parts


def _width(parts: Sequence[Part]) -> int:
    """Columns, of which some characters take two."""
    from rich.cells import cell_len

    return sum(cell_len(text) for text, _ in parts)
