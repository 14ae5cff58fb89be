"""Scenes: masks that are exact, places that are in the grid, the same bytes for the same seed, and files that are looked at."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from nanproof import UsageError
from nanproof_recipes.vlm_grpo.data import scenes
from nanproof_recipes.vlm_grpo.data.scenes import CELL, COLOURS, FORMS, GRID, QUESTIONS, SIDE, SIZES, Scene, Shape, make
from nanproof_recipes.vlm_grpo.train.rewards import box_of


@pytest.fixture(scope="module")
def made():
    return make(200, 60)


def inside(form, side, column, row):
    """Whether the middle of a pixel is in the shape, in whole numbers: twice the distance from the middle of the square."""
    x, y = abs(2 * column + 1 - side), 2 * row + 1 - side
    if form == "circle":
        return x * x + y * y <= side * side
    if form == "triangle":  # from one pixel to each side at the top to the whole width at the bottom
        return 2 * x <= (y + side) + 2
    if form == "diamond":
        return x + abs(y) <= side + 1
    return True


# -- what is drawn ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", SIZES)
def test_a_mask_is_the_pixels_whose_middles_are_in_the_shape(size, form):
    """Against geometry in whole numbers, pixel by pixel, at two places."""
    side = SIZES[size] * CELL
    for left, top in ((0, 0), (GRID - SIZES[size], 1)):
        mask = Shape(size, "red", form, left, top).mask()
        for y in range(SIDE):
            for x in range(SIDE):
                column, row = x - left * CELL, y - top * CELL
                within = 0 <= column < side and 0 <= row < side
                assert mask[y, x] == (within and inside(form, side, column, row))


def test_every_shape_fills_its_cells_from_edge_to_edge_and_is_in_the_grid(made):
    for scene in (*made["train"], *made["valid"]):
        assert 1 <= len(scene.shapes) <= 3
        for shape in scene.shapes:
            left, top, right, bottom = shape.cells
            assert 0 <= left <= right < GRID and 0 <= top <= bottom < GRID
            assert box_of(shape.mask()) == (left * CELL, top * CELL, (right + 1) * CELL, (bottom + 1) * CELL)


def test_no_two_shapes_have_a_pixel_in_common(made):
    for scene in made["train"][:60]:
        assert sum(shape.mask().astype(int) for shape in scene.shapes).max() == 1


def test_pixels_are_bright_where_the_mask_is_and_dim_elsewhere(made):
    """Pixel by pixel, from the shapes."""
    for scene in made["train"][:4]:
        pixels = scene.pixels()
        assert pixels.shape == (SIDE, SIDE, 3) and pixels.dtype == np.uint8
        for y in range(0, SIDE, 3):
            for x in range(0, SIDE, 3):
                colour = (scene.shade,) * 3
                for shape in scene.shapes:
                    colour = COLOURS[shape.colour] if shape.mask()[y, x] else colour
                wanted = [c if scene.mask[y, x] else round(c * scenes.DIM) for c in colour]
                assert pixels[y, x].tolist() == wanted
        assert np.array_equal(np.asarray(scene.picture()), pixels)


def test_the_point_is_a_cell_that_no_other_cell_is_covered_better_than(made):
    for scene in made["train"][:60]:
        shape = scene.region
        count = {
            (x, y): int(shape.mask()[y * CELL : (y + 1) * CELL, x * CELL : (x + 1) * CELL].sum())
            for x in range(GRID)
            for y in range(GRID)
        }
        assert count[shape.point] == max(count.values())
    assert Shape("medium", "red", "circle", 2, 3).point == (3, 4)
    assert Shape("small", "red", "triangle", 0, 0).point == (0, 1)  # its upper half is half empty


# -- the sets --------------------------------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(made, tmp_path):
    """And the bytes are those of any machine: the checksum was written down."""
    paths = [scenes.save(tmp_path / name, make(20, 5, seed)) for name, seed in (("a", 3), ("b", 3), ("c", 4))]
    a, b, c = ([path.read_bytes() for path in found.values()] for found in paths)
    assert a == b and a != c
    assert scenes.checksum(make(20, 5, 3)) == "ea0f4a6a60d443c4" != scenes.checksum(make(20, 5, 4))


def test_making_scenes_leaves_the_random_numbers_of_the_process_alone():
    before = random.getstate(), np.random.get_state()[1].tolist()  # noqa: NPY002
    make(5, 5)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before  # noqa: NPY002


def test_no_picture_is_both_trained_on_and_asked_about(made):
    told = [{(frozenset(s.shapes), s.region) for s in made[name]} for name in ("train", "valid")]
    assert len(told[0]) == 200 and len(told[1]) == 60 and not told[0] & told[1]


def test_both_questions_every_form_size_and_colour_are_asked_about(made):
    train = made["train"]
    assert {s.question for s in train} == {q for asked in QUESTIONS.values() for q in asked}
    assert all(s.question in QUESTIONS[s.ask] for s in train)
    assert {s.region.form for s in train} == set(FORMS) and {s.region.size for s in train} == set(SIZES)
    assert {s.region.colour for s in train} == set(COLOURS)


@pytest.mark.parametrize(("train", "valid"), [(0, 0), (-1, 5), (5, -1)])
def test_no_scenes_at_all_are_refused(train, valid):
    with pytest.raises(UsageError, match=f"--train {train} --valid {valid}: at least one"):
        make(train, valid)


# -- on disk ---------------------------------------------------------------------------------------------------------------------


def test_what_was_saved_is_loaded(made, tmp_path):
    paths = scenes.save(tmp_path / "new" / "data", made)
    assert {name: scenes.load(path) for name, path in paths.items()} == made


def line_of(**changes):
    scene = Scene(
        (Shape("small", "red", "circle", 1, 2), Shape("large", "blue", "square", 4, 4)), 0, "box", QUESTIONS["box"][0], 20
    )
    told = {**scene.to_json(), "caption": scene.caption, "answer": scene.answer, **changes}
    return json.dumps({key: value for key, value in told.items() if value != "LEFT OUT"})


SHAPES = json.loads(line_of())["shapes"]


def other_shape(*told):
    """Instead of the one that is not marked: caption and answer stay right."""
    return line_of(shapes=[SHAPES[0], told])


DAMAGED = {
    "not JSON": "{",
    "not a scene": "[1, 2]",
    "a number": "3",
    "nested too deep": "[" * 100_000,
    "a number of 5000 digits": line_of(shade=0).replace('"shade": 0', '"shade": ' + "9" * 5000),
    **{
        f"no {key}": line_of(**{key: "LEFT OUT"}) for key in ("shapes", "marked", "ask", "question", "shade", "caption", "answer")
    },
    "no shapes": line_of(shapes=[]),
    "shapes are a word": line_of(shapes="circle"),
    "a shape too short": line_of(shapes=[SHAPES[0][:4], SHAPES[1]]),
    "marked outside": line_of(marked=2),
    "marked below": line_of(marked=-1),
    "marked is a fraction": line_of(marked=0.0),
    "marked is true": line_of(marked=True),
    "another ask": line_of(ask="circle"),
    "an ask that is a list": line_of(ask=[]),
    "the question of the other ask": line_of(question=QUESTIONS["point"][0]),
    "a question with an image in it": line_of(question="what is <image> ?"),
    "no shade of grey": line_of(shade=256),
    "a shade that is NaN": line_of(shade=float("nan")),
    "outside on the right": other_shape("large", "blue", "square", GRID - 3, 4),
    "outside at the top": other_shape("large", "blue", "square", 4, -1),
    "between cells": other_shape("large", "blue", "square", 3.5, 4),
    "an unknown size": other_shape("huge", "blue", "square", 4, 4),
    "an unknown colour": other_shape("large", "pink", "square", 4, 4),
    "a colour that is a list": other_shape("large", [], "square", 4, 4),
    "an unknown form": other_shape("large", "blue", "star", 4, 4),
    "one over the other": other_shape("large", "blue", "square", 2, 3),
    "another answer": line_of(answer="small red circle box 1 2 2 4"),
    "another caption": line_of(caption="small red square"),
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=list(DAMAGED))
def test_a_damaged_line_is_named(line, tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(f"{line_of()}\n\n{line}\n")
    with pytest.raises(UsageError, match=r"train\.jsonl, line 3: this is no scene.*vlm-grpo data"):
        scenes.load(path)


def test_the_line_that_the_others_were_made_from_is_sound(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text(line_of())
    assert scenes.load(path)[0].answer == "small red circle box 1 2 2 3"


@pytest.mark.parametrize(
    ("content", "said"), [(None, "cannot be read"), (b"\xff\xfe", "cannot be read"), (b"\n \n", "has no scene in it")]
)
def test_a_file_that_cannot_be_read_or_is_empty_says_so(content, said, tmp_path):
    path = tmp_path / "valid.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=rf"valid\.jsonl {said}.*vlm-grpo data"):
        scenes.load(path)


def test_the_name_of_a_folder_does_not_steer_the_terminal(tmp_path):
    path = tmp_path / "\x1b[2Jx" / "train.jsonl"
    with pytest.raises(UsageError) as error:
        scenes.load(path)
    assert "\x1b" not in str(error.value)
