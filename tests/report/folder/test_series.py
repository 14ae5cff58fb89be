"""Curves and heat maps in buckets say the same as all steps together."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanproof._records import ABSENT
from nanproof.report.folder._series import METRICS, Curves, Heat

numbers = st.one_of(st.floats(-1e6, 1e6), st.sampled_from([math.nan, math.inf, -math.inf]))
cells = st.one_of(st.none(), st.floats(0, 1e6), st.sampled_from(["nan", "inf"]))
steps = st.lists(st.tuples(numbers, st.sampled_from(["stepped", "clipped", "skipped"])), max_size=300)


def same(a, b):
    return a == b or (a != a and b != b) or math.isclose(a, b, rel_tol=1e-9, abs_tol=1e-6)


@settings(max_examples=60)
@given(steps, st.integers(2, 20))
def test_buckets_hold_what_the_steps_in_them_were(taken, most):
    curves = Curves(most)
    for step, (x, action) in enumerate(taken):
        curves.add(step, (x, abs(x), 1e-3, None), action)
    assert len(curves) <= most
    starts = [*curves.steps, len(taken)]
    assert starts[0] == 0 and all(start % curves.width == 0 for start in starts[:-1])
    for i, (start, end) in enumerate(itertools.pairwise(starts)):
        inside = taken[start:end]
        finite = [x for x, _ in inside if math.isfinite(x)]
        assert same(curves.low("loss")[i], min(finite, default=math.nan))
        assert same(curves.high("loss")[i], max(finite, default=math.nan))
        assert same(curves.mean("loss")[i], sum(finite) / len(finite) if finite else math.nan)
        assert curves.bad("loss")[i] == len(inside) - len(finite)
        assert curves.skipped[i] == sum(action == "skipped" for _, action in inside)
        assert curves.clipped[i] == sum(action == "clipped" for _, action in inside)
        assert math.isnan(curves.mean("scale")[i])


def test_steps_taken_again_replace_those_given_up():
    curves, heat = Curves(100), Heat()
    for step in range(30):
        curves.add(step, (1.0, 1.0, None, None), "stepped")
        heat.add(step, ("w",), [1.0])
    for series in (curves, heat):
        series.go_back(20)
    for step in range(20, 25):
        curves.add(step, (9.0, 1.0, None, None), "stepped")
        heat.add(step, ("w",), [9.0])
    assert curves.steps == heat.steps == list(range(25))
    assert curves.mean("loss") == [1.0] * 20 + [9.0] * 5
    assert [column[0] for column in heat.columns] == [1.0] * 20 + [9.0] * 5


@settings(max_examples=40)
@given(
    st.lists(
        st.lists(st.one_of(st.none(), st.floats(0, 1e6), st.sampled_from(["nan", "inf"])), min_size=3, max_size=3), max_size=80
    ),
    st.integers(2, 10),
)
def test_a_column_is_the_largest_of_its_steps(rows, most):
    heat, names = Heat(most), ("a", "b", "c")
    for step, row in enumerate(rows):
        heat.add(step, names, row)
    assert len(heat.columns) <= most

    def value(x):
        return ABSENT if x is None else math.inf if isinstance(x, str) else x

    for start, column in zip(heat.steps, heat.columns, strict=True):
        inside = rows[start : start + heat.width]
        assert list(column) == [max(value(row[i]) for row in inside) for i in range(3)]


def test_names_may_change_in_the_middle_of_a_run():
    """A resumed run that trains other parameters, in another order."""
    heat = Heat()
    heat.add(0, ("a", "b"), [1.0, 2.0])
    heat.add(1, ("c", "b"), [3.0, 4.0])
    heat.add(2, ("b",), [5.0])
    assert heat.names == ["a", "b", "c"]
    assert [list(column) for column in heat.columns] == [[1, 2, ABSENT], [ABSENT, 4, 3], [ABSENT, 5, ABSENT]]


@pytest.mark.parametrize("count", [0, 1, 100_000])
def test_any_length_fits(count):
    curves = Curves()
    for step in range(count):
        curves.add(step, (float(step), None, None, None), "stepped")
    assert len(curves) <= 2000 and len(curves.low(METRICS[0])) == len(curves.steps)
    assert not count or curves.high("loss")[-1] == count - 1


def test_the_mean_of_the_largest_numbers_is_a_number():
    """Their sum is Inf, and a bucket without a mean would read as if its values were not finite."""
    curves = Curves(1)
    for step in range(8):
        curves.add(step, (1.5e308 if step % 2 else 1.1e308, None, None, None), "stepped")
    assert len(curves) == 1 and curves.low("loss")[0] <= curves.mean("loss")[0] <= curves.high("loss")[0]
