"""Images of coloured shapes, one of them marked by a mask, with a caption and the box or a point of it: data made on the spot.

A scene is drawn by arithmetic, so that its mask is exact and the same seed gives the same bytes anywhere. What the mask covers
is bright and the rest is dim: that is how the model sees which region is meant. Places are told in cells of a grid.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from nanproof import UsageError
from nanproof_recipes.folders import BEGUN
from nanproof_recipes.library import printable, write_whole
from nanproof_recipes.vlm_grpo.arms import WARM

SIDE, CELL = 32, 4
"""Pixels of an image's side, and of a cell's."""
GRID = SIDE // CELL
COLOURS = {
    "red": (230, 40, 40),
    "green": (40, 200, 60),
    "blue": (50, 80, 240),
    "yellow": (240, 220, 40),
    "purple": (170, 50, 200),
    "white": (240, 240, 240),
}
FORMS = ("circle", "square", "triangle", "diamond")
SIZES = {"small": 2, "medium": 3, "large": 4}
"""Cells of a shape's side."""
ASKS = ("box", "point")
Ask = Literal["box", "point"]
QUESTIONS = {
    "box": ("describe the bright region and give its box", "what is marked ? answer with a box"),
    "point": ("describe the bright region and give a point in it", "what is marked ? answer with a point"),
}
DIM = 0.3
"""How bright what is not marked stays."""
Cells = tuple[int, int, int, int]
"""Left, top, right, bottom; the last cells are in it."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A coloured shape that fills the square of its cells from edge to edge."""

    size: str
    colour: str
    form: str
    left: int
    top: int

    @property
    def caption(self) -> str:
        return f"{self.size} {self.colour} {self.form}"

    @property
    def cells(self) -> Cells:
        reach = SIZES[self.size] - 1
        return self.left, self.top, self.left + reach, self.top + reach

    @property
    def point(self) -> tuple[int, int]:
        """The cell that it covers most; of several the one nearest to its middle. A triangle's middle is not full of it."""
        left, top, right, bottom = self.cells
        share = covered(self.mask())
        cells = [(x, y) for y in range(top, bottom + 1) for x in range(left, right + 1)]
        return min(
            cells, key=lambda at: (-share[at[1], at[0]], (2 * at[0] - left - right) ** 2 + (2 * at[1] - top - bottom) ** 2)
        )

    def apart_from(self, other: Shape) -> bool:
        """Whether there is no cell that both would fill."""
        left, top, right, bottom = self.cells
        other_left, other_top, other_right, other_bottom = other.cells
        return right < other_left or other_right < left or bottom < other_top or other_bottom < top

    def mask(self) -> NDArray[np.bool_]:
        """Its pixels, exactly."""
        side = SIZES[self.size] * CELL
        y, x = (np.indices((side, side)) * 2 + 1) / side - 1  # middles of pixels, from -1 to 1
        inside = {
            "circle": x**2 + y**2 <= 1,
            "square": np.full((side, side), True),
            "triangle": np.abs(x) <= (y + 1) / 2 + 1 / side,
            "diamond": np.abs(x) + np.abs(y) <= 1 + 1 / side,
        }[self.form]
        whole = np.zeros((SIDE, SIDE), dtype=bool)
        whole[self.top * CELL : self.top * CELL + side, self.left * CELL : self.left * CELL + side] = inside
        return whole


def covered(mask: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The share of each cell that a mask covers: row, column."""
    shares: NDArray[np.float64] = mask.reshape(GRID, CELL, GRID, CELL).mean((1, 3))
    return shares


@dataclass(frozen=True, slots=True)
class Scene:
    """An image with one marked region, a question about it, and what is right."""

    shapes: tuple[Shape, ...]
    marked: int
    ask: Ask
    question: str
    shade: int
    """Grey of the ground."""

    @property
    def region(self) -> Shape:
        return self.shapes[self.marked]

    @property
    def caption(self) -> str:
        return self.region.caption

    @property
    def mask(self) -> NDArray[np.bool_]:
        return self.region.mask()

    @property
    def answer(self) -> str:
        """What a reply should be: the caption, and the box or the best point."""
        place = self.region.cells if self.ask == "box" else self.region.point
        return " ".join([self.caption, self.ask, *map(str, place)])

    def pixels(self) -> NDArray[np.uint8]:
        """Height, width, colour."""
        image = np.full((SIDE, SIDE, 3), self.shade, dtype=np.float64)
        for shape in self.shapes:
            image[shape.mask()] = COLOURS[shape.colour]
        image[~self.mask] *= DIM
        return image.round().astype(np.uint8)

    def picture(self) -> Any:
        """As an image of PIL."""
        from PIL import Image

        return Image.fromarray(self.pixels())

    def to_json(self) -> dict[str, Any]:
        shapes = [[s.size, s.colour, s.form, s.left, s.top] for s in self.shapes]
        return {"shapes": shapes, "marked": self.marked, "ask": self.ask, "question": self.question, "shade": self.shade}


def make(train: int, valid: int, seed: int = 0) -> dict[str, list[Scene]]:
    """Scenes "train" and "valid"; no scene is in both."""
    if min(train, valid) < 0 or train + valid < 1:
        raise UsageError(f"--train {train} --valid {valid}: at least one scene is needed")
    rng = random.Random(f"vlm-grpo {seed}")
    seen: set[Any] = set()
    made: list[Scene] = []
    while len(made) < train + valid:
        scene = _one(rng)
        told = (frozenset(scene.shapes), scene.region)
        if told not in seen:
            seen.add(told)
            made.append(scene)
    return {"train": made[:train], "valid": made[train:]}


def _one(rng: random.Random) -> Scene:
    shapes: list[Shape] = []
    wanted = rng.randint(1, 3)
    while len(shapes) < wanted:
        size = rng.choice(list(SIZES))
        room = GRID - SIZES[size]
        shape = Shape(size, rng.choice(list(COLOURS)), rng.choice(FORMS), rng.randint(0, room), rng.randint(0, room))
        if all(shape.apart_from(other) for other in shapes):
            shapes.append(shape)
        elif shapes and rng.random() < 0.05:
            break  # too full for one more
    ask: Ask = "box" if rng.random() < 0.5 else "point"
    return Scene(tuple(shapes), rng.randrange(len(shapes)), ask, rng.choice(QUESTIONS[ask]), rng.randint(10, 60))


# -- on disk -------------------------------------------------------------------------------------------------------------------


def keep(out: Path, made: Mapping[str, Sequence[Scene]]) -> dict[str, Path]:
    """Put scenes into the folder of a recipe, unless models in it were trained with others: nobody could use those any more."""
    folder = out / "data"
    paths = {name: folder / f"{name}.jsonl" for name in made}
    if (out / WARM / BEGUN).exists() and checksum({name: load(path) for name, path in paths.items()}) != checksum(made):
        raise UsageError(f"{printable(str(out))} has models that were trained with other scenes. Choose another --out")
    return save(folder, made)


def save(folder: Path, sets: Mapping[str, Sequence[Scene]]) -> dict[str, Path]:
    """One line of JSON a scene: what it is drawn from, with its caption and answer beside it for people."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for name, scenes in sets.items():
        lines = [json.dumps({**scene.to_json(), "caption": scene.caption, "answer": scene.answer}) for scene in scenes]
        write_whole(folder / f"{name}.jsonl", "".join(f"{line}\n" for line in lines))
        paths[name] = folder / f"{name}.jsonl"
    return paths


def load(path: Path) -> list[Scene]:
    """The scenes of a file that `save` wrote."""
    where = printable(str(path))
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{where} cannot be read ({error}). `nanproof recipe vlm-grpo data` makes it") from error
    found = [_read(where, number, line) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise UsageError(f"{where} has no scene in it. `nanproof recipe vlm-grpo data` makes it anew, with one at least")
    return found


def _read(where: str, number: int, line: str) -> Scene:
    try:
        told = json.loads(line)
        scene = Scene(tuple(Shape(*s) for s in told["shapes"]), told["marked"], told["ask"], told["question"], told["shade"])
        ok = _sound(scene) and (told["caption"], told["answer"]) == (scene.caption, scene.answer)
    except (ValueError, KeyError, TypeError, RecursionError):
        ok = False
    if not ok:
        raise UsageError(f"{where}, line {number}: this is no scene. `nanproof recipe vlm-grpo data` makes the file anew")
    return scene


def _sound(scene: Scene) -> bool:
    """Whether `make` could have made it: shapes in the grid, none over another, and a question that was meant for the model."""
    numbers = [scene.marked, scene.shade, *(n for s in scene.shapes for n in (s.left, s.top))]
    if not all(type(n) is int for n in numbers) or not 0 <= scene.marked < len(scene.shapes) or not 0 <= scene.shade <= 255:
        return False
    for i, s in enumerate(scene.shapes):
        room = GRID - SIZES[s.size]
        inside = 0 <= s.left <= room and 0 <= s.top <= room and s.colour in COLOURS and s.form in FORMS
        if not inside or not all(s.apart_from(other) for other in scene.shapes[:i]):
            return False
    return scene.question in QUESTIONS[scene.ask]


def checksum(sets: Mapping[str, Sequence[Scene]]) -> str:
    """Which scenes they are: results of other ones are other results."""
    told = "\n".join(json.dumps(scene.to_json()) for name in sorted(sets) for scene in sets[name])
    return hashlib.sha256(told.encode()).hexdigest()[:16]
