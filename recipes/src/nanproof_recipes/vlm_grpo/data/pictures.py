"""Scenes as files that a person can look at, each picture with its mask beside it. Training draws its own and reads none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nanproof_recipes.vlm_grpo.data.scenes import Scene

LARGER = 8
"""Times the side: 32 pixels are too few to look at. No two pixels are mixed."""


def write_pictures(folder: Path, scenes: Sequence[Scene]) -> list[Path]:
    """`000.png` and `000-mask.png` for each; the paths of the first."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, scene in enumerate(scenes):
        paths.append(folder / f"{number:03}.png")
        mask = np.where(scene.mask, 255, 0).astype(np.uint8)
        for path, pixels in ((paths[-1], scene.pixels()), (folder / f"{number:03}-mask.png", mask)):
            Image.fromarray(pixels.repeat(LARGER, 0).repeat(LARGER, 1)).save(path)
    return paths
