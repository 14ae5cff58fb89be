"""A model of as many parameters as asked for, and how many of nanproof's functions are called. For tests of what a healthy step
costs: calls can be counted where seconds cannot be measured."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import nanproof

STEPS, FIRST, LAST = 24, 12, 19
"""How many steps to take, and in which to count: at none of those weights are sampled, or the graph of the loss is read."""
NANPROOF = str(Path(nanproof.__file__).parent)
ROOMS = ("explain/lines/", "explain/replay/", "integrations/", "core/support/_tree.py", "core/support/_context.py")


class Wide(nn.Module):
    """One cheap layer of as many parameters as asked for."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(4) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        return x @ torch.stack(tuple(self.parts)).sum(0)


class Calls:
    """Counts calls of nanproof's functions, by room, while it is open."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __enter__(self) -> Calls:
        gc.disable()
        sys.setprofile(self._see)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)
        gc.enable()

    def _see(self, frame: FrameType, event: str, argument: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(NANPROOF):
            inside = name[len(NANPROOF) + 1 :]
            self.counts.update(room for room in ROOMS if inside.startswith(room))
