"""Story and Curve: what is remembered of a log of any length, and where one run ends and the next begins."""

from __future__ import annotations

import math
import random
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanproof.logs._curve import BUCKETS, Curve, Place, number
from nanproof.logs._points import Batch, Note, Point, singly
from nanproof.logs._story import SEGMENTS, Story, Track


def told(*points, **common):
    story = Story()
    for i, point in enumerate(points, 1):
        story.add(point if isinstance(point, Note) else Point({"loss": point[1], **common}, step=point[0], line=i))
    return story


@pytest.mark.parametrize("count", [1, 5, 16, 17, 100, 1000])
def test_a_curve_loses_no_point_when_its_buckets_merge(count):
    """Counts, extremes and sums of all buckets are those of the values, whatever was merged with what."""
    random.seed(count)
    values = [random.choice([random.gauss(0, 1), math.nan, math.inf]) for _ in range(count)]
    curve = Curve(most=16)
    for i, value in enumerate(values):
        curve.add(value, Place(i, i, None, i + 1))
    finite = [v for v in values if math.isfinite(v)]
    assert len(curve) <= 16
    assert sum(b.count for b in curve.buckets) == count
    assert sum(b.finite for b in curve.buckets) == len(finite)
    assert sum(b.total for b in curve.buckets) == pytest.approx(sum(finite))
    assert min((b.low for b in curve.buckets), default=0) == min(finite, default=math.inf)
    assert max((b.high for b in curve.buckets), default=0) == max(finite, default=-math.inf)
    orders = [b.place.order for b in curve.buckets]
    assert orders == sorted(orders) and orders[-1] == count - 1
    assert all(math.isnan(b.shown) for b in curve.buckets if b.finite < b.count)


def test_a_log_far_longer_than_the_curve_needs_little_memory():
    story = Story()
    for i in range(200_000):
        story.add(Point({"loss": 1.0, "grad_norm": 2.0}, step=i, line=i + 1))
    segment = story.now
    held = sum(len(track.curve) for track in segment.tracks.values())
    assert story.points == 200_000 and held <= 2 * BUCKETS
    assert sum(map(sys.getsizeof, segment.track("loss").curve.buckets)) < 200_000
    assert sum(b.count for b in segment.track("loss").curve.buckets) == 200_000


def test_the_exact_facts_do_not_depend_on_the_buckets():
    """First NaN, last number and the stretch to the end, in a log far longer than the curve."""
    story = Story()
    for i in range(10_000):
        bad = i == 4_321 or i >= 9_000
        story.add(Point({"loss": math.nan if bad else float(i)}, step=i, line=i + 1))
    track = story.now.track("loss")
    assert (track.bad.first.step, track.bad.since.step, track.bad.count, track.bad.unbroken) == (4_321, 9_000, 1_001, 1_000)
    assert track.last_finite[0].step == 8_999 and track.last_finite[1] == 8_999.0


def test_what_loss_and_gradient_say_together():
    story = Story()
    for loss, norm in ((1.0, 1.0), (0.0, math.nan), (0.0, 0.0), (2.0, math.inf), (2.0, 0.0), (math.nan, math.nan)):
        story.add(Point({"loss": loss, "grad_norm": norm}, line=story.points + 1))
    found = {name: (s.count, s.first.line) for name, s in story.now.together.items()}
    assert found == {"hidden": (1, 2), "nothing": (1, 3), "gradient": (1, 4), "still": (1, 5)}


def test_steps_that_fall_back_begin_a_new_run():
    story = told(*[(i, 1.0) for i in range(0, 100, 10)], *[(i, 1.0) for i in range(0, 50, 10)])
    assert [(s.points, s.resumed) for s in story.segments] == [(10, False), (5, False)]


def test_a_resumed_run_goes_on_from_where_it_was():
    points = [(i, 1.0) for i in range(100)]
    story = told(*points, *points[60:], (101, 1.0))
    assert [(s.points, s.resumed) for s in story.segments] == [(100, False), (41, True)]
    said = told(*points, Note("resumed", "Resuming from step 98", 101), *points[98:])
    assert [(s.points, s.resumed) for s in said.segments] == [(100, False), (2, True)], "even a step or two, if it is said"


def test_lines_of_ranks_out_of_order_are_one_run():
    steps = [0, 0, 1, 0, 1, 2, 1, 2, 3, 3, 2, 4]
    assert len(told(*[(s, 1.0) for s in steps]).segments) == 1


def test_epochs_that_fall_back_count_where_there_are_no_steps():
    story = Story()
    for epoch in (0.1, 0.2, 0.3, 0.1, 0.2):
        story.add(Point({"loss": 1.0}, epoch=epoch, line=story.points + 1))
    assert [s.points for s in story.segments] == [3, 2]


def test_steps_that_begin_again_in_every_epoch_are_one_run():
    story = Story()
    for epoch in range(3):
        for step in range(20):
            story.add(Point({"loss": 1.0}, step=step, epoch=epoch, line=story.points + 1))
    assert len(story.segments) == 1
    places = [b.place.step for b in story.now.track("loss").curve.buckets]
    assert places == list(range(60)), "counted on, so that the schedule can be read"


def test_a_log_that_begins_again_all_the_time_stays_bounded():
    story = told(*[(step, 1.0) for _ in range(300) for step in (0, 10, 20, 30, 40)])
    assert len(story.segments) == SEGMENTS and story.dropped == 300 - SEGMENTS
    assert story.points == 1500


def test_steps_and_settings_that_are_no_numbers_are_ignored():
    story = Story()
    story.add(Point({"loss": 1.0}, step=math.nan, epoch=math.inf, line=1, settings={"steps": math.inf, "lr": 1e-3}))
    assert story.now.first == Place(0, None, None, 1) and story.now.settings == {"lr": 1e-3}


@pytest.mark.parametrize(
    ("value", "shown"), [(3.0, "3"), (0.5875, "0.5875"), (1.23456789e-5, "1.235e-05"), (math.nan, "nan"), (-math.inf, "-inf")]
)
def test_numbers_are_short(value, shown):
    assert number(value) == shown


def test_places_name_what_the_log_names():
    assert str(Place(0, 30.0, 0.5, 7)) == "step 30, line 7"
    assert str(Place(0, None, 0.31, 1)) == "epoch 0.31, line 1"
    assert str(Place(0, None, None, 4)) == "line 4"


@given(
    losses=st.lists(st.one_of(st.floats(0.01, 1e6), st.sampled_from([math.nan, math.inf, 0.0, -1.0])), min_size=1, max_size=60),
    before=st.lists(st.floats(0.01, 10), max_size=3),
    most=st.sampled_from([4, 16, 2048]),
)
@settings(max_examples=200)
def test_a_batch_is_what_its_points_are(losses, before, most):
    """The same story, whether points come one at a time or as columns; sums are equal to rounding."""
    like = Point({"loss": 1.0, "grad_norm": 1.0}, step=0.0, names={"loss": "loss"})
    steps = [float(i + len(before)) for i in range(len(losses))]
    norms = [abs(loss) if math.isfinite(loss) else 1.0 for loss in losses]
    batch = Batch({"loss": losses, "grad_norm": norms}, {"kl": losses[::-1]}, steps, [s / 10 for s in steps], 7, like)
    stories = []
    for items in ([batch], list(singly([batch]))):
        story = told(*enumerate(before))
        for name in ("loss", "grad_norm"):
            story.now.tracks.setdefault(name, Track()).curve.most = most
        for item in items:
            story.add(item)
        stories.append(story)
    together, apart = (list(facts(story)) for story in stories)
    assert repr(together) == repr(apart)


def facts(story):
    """Everything that is remembered, with sums to six digits."""
    for segment in story.segments:
        yield segment.points, segment.first, segment.last, segment.together, segment.missing, sorted(segment.names.items())
        for name, track in sorted((segment.tracks | segment.terms).items()):
            yield name, track.bad, track.zero, track.first_finite, track.last_finite, track.low, track.high, track.least
            for b in track.curve.buckets:
                yield b.place, b.last, b.count, b.finite, f"{b.total:.6g}", b.low, b.high
