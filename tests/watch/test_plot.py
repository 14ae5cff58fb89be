"""Curves in characters say what the numbers say."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from nanproof.watch._charts import Window, heights
from nanproof.watch._plot import ASCII, FINE, Series, axis, chart, count, marks_for, scale, short, spark
from nanproof.watch._runs import View
from nanproof.watch._table import runs_table

PLACES = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3))
"""(column, row) of the bits of a Braille character, in their order."""


def one_each(values: list[float], width: int = 1) -> Series:
    bad = [int(not math.isfinite(x)) for x in values]
    finite = [x if math.isfinite(x) else math.nan for x in values]
    return Series([i * width for i in range(len(values))], width, finite, finite, finite, bad)


def dots(rows, marks) -> set[tuple[int, int]]:
    """(x, y) of every dot of a line, y from the bottom: the characters read back."""
    found = set()
    for row, parts in enumerate(rows):
        text = "".join(t for t, _ in parts)
        kinds = [kind for t, kind in parts for _ in t]
        for x, (c, kind) in enumerate(zip(text, kinds, strict=True)):
            if kind != "line":
                continue
            places = [(0, {"'": 0, ",": 1}.get(c, k)) for k in range(2)] if marks.ascii else PLACES
            code = -1 if marks.ascii else ord(c) - 0x2800
            for bit, (dx, dy) in enumerate(places):
                if code < 0 or code >> bit & 1:
                    found.add((x * marks.columns + dx, (len(rows) - 1 - row) * marks.rows + marks.rows - 1 - dy))
    return found


@pytest.mark.parametrize("marks", [FINE, ASCII])
@pytest.mark.parametrize("how", ["linear", "log"])
def test_every_value_has_its_dot_and_dots_between_touch(marks, how):
    """One value a column of dots: the dot is where the value is, and the line from one to the next has no gap."""
    columns, rows = 20, 6
    noise = random.Random(5)
    values = [math.exp(noise.gauss(0, 1) + i / 20) for i in range(columns * marks.columns)]
    fits = scale(values, how)
    found = dots(chart(one_each(values), (0, len(values)), columns, rows, fits, marks), marks)
    high = rows * marks.rows
    for x, value in enumerate(values):
        low, top = min(values), max(values)
        share = math.log(value / low) / math.log(top / low) if how == "log" else (value - low) / (top - low)
        assert any(abs(y - share * (high - 1)) <= 0.5001 for a, y in found if a == x), (x, value)
    for x in range(1, len(values)):
        here, before = ({y for a, y in found if a == k} for k in (x, x - 1))
        assert min(abs(y - z) for y in here for z in before) <= 1


def test_crosses_stand_where_the_numbers_are_not():
    values = [1.0, 2.0, math.nan, 3.0, 2.5, math.inf, -math.inf, 1.0]
    rows = chart(one_each(values), (0, 8), 8, 3, scale([1.0, 3.0], "linear"), ASCII)
    assert "".join(t for t, _ in rows[0])[2] == "x"
    crosses = [i for i, c in enumerate("".join(t for t, _ in rows[0])) if c == "x"]
    assert crosses == [2, 5, 6]
    assert all(x not in (2, 5, 6) for x, _ in dots(rows, ASCII))


def test_a_bucket_of_many_steps_shows_its_lowest_and_highest():
    """A spike of one step among 64 is not averaged away."""
    series = Series([0, 64, 128, 192], 64, [1.0] * 4, [1.0, 9.0, 1.0, 1.0], [1.0, 1.1, 1.0, 1.0], [0] * 4)
    rows = chart(series, (0, 256), 20, 8, scale(series.finite(0, 256), "linear"), FINE)
    band = [x for row in rows[:2] for x, kind in enumerate(k for t, k in row for _ in t) if kind == "band"]
    assert band and all(5 <= x < 10 for x in band)


def test_no_values_no_scale_and_equal_values_are_in_the_middle():
    assert scale([]) is None
    for value in (0.0, 3.0, -2.0, 1e-30):
        fits = scale([value, value])
        assert fits is not None and 0.3 < fits.share(value) < 0.7
    assert scale([1.0, 1000.0]).log and not scale([1.0, 50.0]).log and not scale([-1.0, 1000.0]).log


def test_marks_stand_at_their_steps_and_the_worst_wins():
    line, labels = axis((0, 100), 50, [(10, "forecast"), (10, "refused"), (60, "incident"), (500, "refused")], FINE)
    text = "".join(t for t, _ in line)
    assert [(x, c) for x, c in enumerate(text) if c in FINE.events.values()] == [(5, "▲"), (30, "△")]
    numbers = "".join(t for t, _ in labels)
    for x, c in enumerate(text):
        if c == FINE.tick:
            near = numbers[max(x - 3, 0) : x + 4].split()
            assert any(abs(int(n) - x * 2) <= 2 for n in near), (x, numbers)


def test_steps_close_together_have_labels_that_differ():
    _, labels = axis((100_050, 100_200), 80, [], FINE)
    found = "".join(t for t, _ in labels).split()
    assert len(found) == len(set(found)) > 2


@pytest.mark.parametrize("value", [0.0, 1.0, 2.345678, 65536.0, 123456.7, 1e-8, 3.21e12, 0.00123456, -17.5, 9999.9, 99999.0])
def test_numbers_are_short_and_right(value):
    assert len(short(value)) <= 8
    assert float(short(value)) == pytest.approx(value, rel=0.06)


def test_what_is_no_number_is_named():
    assert [short(x) for x in (None, math.nan, math.inf, -math.inf)] == ["-", "NaN", "Inf", "-Inf"]
    assert [count(n) for n in (0, 999, 2000, 125_000, 1_250_000)] == ["0", "999", "2k", "125k", "1.25M"]


def test_terminals_get_what_they_can_write():
    assert marks_for("utf-8") is FINE and marks_for("UTF-8", "xterm") is FINE
    for encoding in ("ascii", "latin-1", "cp1252", "cp437", None, "nonsense"):
        assert marks_for(encoding) is ASCII
    assert marks_for("utf-8", "linux") is ASCII
    for value in (ASCII.cross, ASCII.corner, ASCII.side, ASCII.floor, ASCII.tick, *ASCII.events.values(), ASCII.blocks):
        assert value.isascii()
    assert spark([1.0, math.nan, 3.0], 3, ASCII).isascii() and spark([], 4, FINE) == "    "


def test_curves_share_the_height_and_the_first_comes_first():
    metrics = ["loss", "grad_norm", "lr", "scale"]
    for rows in range(60):
        found = heights(metrics, rows)
        assert list(found) == metrics[: len(found)]
        assert sum(found.values()) + len(found) == (rows if found else 0)
    assert list(heights(metrics, 4)) == ["loss"] and list(heights(metrics, 40)) == metrics


def test_zoom_and_pan_stay_within_the_run():
    """Whatever is pressed: what is shown is a part of the run, and following ends at its newest step."""
    view = View(folder=None, name="", step=999, series={"loss": one_each([1.0] * 1000)})
    window, random_keys = Window(), random.Random(1)
    for _ in range(500):
        key = random_keys.choice(["in", "in", "out", "left", "right", "hold"])
        if key in ("in", "out"):
            window = window.zoomed(0.5 if key == "in" else 2.0, view)
        elif key == "hold":
            window = window.held(view)
        else:
            window = window.moved(-0.25 if key == "left" else 0.25, view)
        start, end = window.span(view)
        assert -1e-6 <= start < end <= 1000 + 1e-6 and end - start >= 10 - 1e-6
        assert window.end is not None or end == 1000


def test_rare_refused_steps_do_not_cross_out_a_long_curve():
    """A cross only where most of a column is not finite; a run of nothing else is all crosses, not an empty line."""
    values = [math.nan if i % 50 == 7 else 10 - i / 100 for i in range(1000)]
    assert spark(values, 20, FINE) == spark([10 - i / 100 for i in range(1000)], 20, FINE)
    most = [math.nan if 500 <= i < 540 else 1.0 for i in range(1000)]
    assert [i for i, c in enumerate(spark(most, 20, ASCII)) if c == "x"] == [10]
    assert spark([math.nan] * 30, 8, ASCII) == "x" * 8


def test_a_bucket_with_one_refused_step_has_a_height_in_the_list_of_runs():
    """Buckets of a long run hold many steps: one of them that was NaN is counted under `refused`, and the curve goes on."""
    series = Series(range(0, 800, 8), 8, [1.0] * 100, [2.0] * 100, [1.5] * 100, [1] * 50 + [7] * 50)
    view = View(folder=Path("run"), name="run", step=799, series={"loss": series})
    text = "".join(part for part, _ in runs_table([view], 100, ASCII)[1][0].lines[0])
    assert text.count("x") == 20 and text.endswith("x" * 20), "half of forty columns"
