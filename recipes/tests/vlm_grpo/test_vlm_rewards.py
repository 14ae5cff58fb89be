"""Rewards: against slow oracles, from 0 to 1 for whatever a model may write, and the best for the right answer."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanproof_recipes.vlm_grpo.data.scenes import CELL, COLOURS, FORMS, GRID, SIDE, SIZES, Scene, Shape, make
from nanproof_recipes.vlm_grpo.train.rewards import BEST, Reply, caption_reward, hits, iou, parse, place_reward, reward, token_f1

SCENES = make(120, 0)["train"]


def slow_f1(said, right):
    """Each right word is crossed out once."""
    left, common = list(right), 0
    for word in said:
        if word in left:
            left.remove(word)
            common += 1
    if not common:
        return 0.0
    precision, recall = common / len(said), common / len(right)
    return 2 * precision * recall / (precision + recall)


def slow_iou(box, mask):
    """Pixel by pixel, with the box around the mask."""
    marked = [(x, y) for y in range(SIDE) for x in range(SIDE) if mask[y, x]]
    xs, ys = [x for x, _ in marked], [y for _, y in marked]
    around = {(x, y) for x in range(min(xs), max(xs) + 1) for y in range(min(ys), max(ys) + 1)}
    own = {(x, y) for x in range(box[0] * CELL, (box[2] + 1) * CELL) for y in range(box[1] * CELL, (box[3] + 1) * CELL)}
    return len(own & around) / len(own | around)


# -- against oracles -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from("abcd"), max_size=8), st.lists(st.sampled_from("abcd"), max_size=5))
@settings(max_examples=100)
def test_token_f1_is_the_harmonic_mean_of_precision_and_recall(said, right):
    assert token_f1(said, right) == pytest.approx(slow_f1(said, right), abs=1e-12)


def test_iou_is_that_of_sets_of_pixels():
    rng = random.Random(0)
    for scene in SCENES[:30]:
        x, y = sorted(rng.choices(range(GRID), k=2)), sorted(rng.choices(range(GRID), k=2))
        box = (x[0], y[0], x[1], y[1])
        assert iou(box, scene.mask) == pytest.approx(slow_iou(box, scene.mask), abs=1e-12)


def test_a_point_is_worth_its_cell_against_the_best_cell():
    for scene in SCENES[:4]:
        pixels = {
            (x, y): sum(bool(scene.mask[y * CELL + j, x * CELL + i]) for i in range(CELL) for j in range(CELL))
            for x in range(GRID)
            for y in range(GRID)
        }
        for at, count in pixels.items():
            assert hits(at, scene.mask) == pytest.approx(count / max(pixels.values()), abs=1e-12)


@pytest.mark.parametrize("ask", ["box", "point"])
def test_the_answer_of_every_scene_is_worth_the_most(ask):
    """Of every size and form, also those that fill no cell."""
    for size in SIZES:
        for form in FORMS:
            scene = Scene((Shape(size, next(iter(COLOURS)), form, 1, 3),), 0, ask, "?", 0)
            assert reward(scene.answer, scene) == BEST
    assert all(reward(scene.answer, scene) == BEST for scene in SCENES)
    assert {scene.ask for scene in SCENES} == {"box", "point"}


# -- what is read ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", Reply((), None)),
        ("small red circle", Reply(("small", "red", "circle"), None)),
        ("red box 1 2 3 4", Reply(("red",), "box", (1, 2, 3, 4))),
        ("red box 1 2 3 4 5 blue", Reply(("red",), "box", (1, 2, 3, 4))),
        ("red point 7 0", Reply(("red",), "point", (7, 0))),
        ("red box 1 2 3", Reply(("red",), None)),
        ("red box 1 2 3 8", Reply(("red",), None)),
        ("red box 3 2 1 4", Reply(("red",), None)),
        ("red box 1 4 3 2", Reply(("red",), None)),
        ("red point -1 0", Reply(("red",), None)),
        ("red point 1.0 0", Reply(("red",), None)),
        ("red point ٣ 0", Reply(("red",), None)),
        ("red point ² 0", Reply(("red",), None)),
        ("red point 1_0 0", Reply(("red",), None)),
        ("red box box 1 2 3 4", Reply(("red",), None)),
        ("box point 1 1", Reply((), None)),
    ],
)
def test_what_is_a_place_and_what_is_none(text, wanted):
    assert parse(text) == wanted


def test_a_box_is_worth_nothing_where_a_point_was_asked_for():
    for scene in SCENES[:20]:
        left, top, right, bottom = scene.region.cells
        other = f"point {left} {top}" if scene.ask == "box" else f"box {left} {top} {right} {bottom}"
        assert place_reward(other, scene) == 0 and caption_reward(f"{scene.caption} {other}", scene) == 1


HOSTILE = [
    "",
    " \t\n",
    "box",
    "point",
    "box " + "9" * 5000 + " 1 2 3",
    "point " + "0" * 5000 + " 1",
    "point -0 -0",
    "point 1e400 nan",
    "box inf inf inf inf",
    "point ٣ ٤",
    "point 𝟏 𝟏",
    "box 0 0 7 7 " * 500,
    "red " * 5000,
    "\x00\x1b[2J box 1 1 1 1",
    "\ud800 point 1 1",
    "point\u00a01\u20031",
]


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_reply_has_a_reward_like_any_other(text):
    for scene in SCENES[:6]:
        for value in (caption_reward(text, scene), place_reward(text, scene)):
            assert isinstance(value, float) and math.isfinite(value) and 0 <= value <= 1


WORDS = [*"0123456789", "10", "-1", "box", "point", "<iou>", "<unk>", *COLOURS, *FORMS, *SIZES]


@given(
    st.one_of(st.text(max_size=40), st.lists(st.sampled_from(WORDS), max_size=12).map(" ".join)),
    st.integers(0, len(SCENES) - 1),
)
@settings(max_examples=100)
def test_no_reply_is_worth_less_than_nothing_or_more_than_the_answer(text, which):
    scene = SCENES[which]
    caption, place = caption_reward(text, scene), place_reward(text, scene)
    assert 0 <= caption <= 1 and 0 <= place <= 1 and reward(text, scene) == caption + place <= BEST
    assert not np.isnan(caption + place)
