"""What the comparisons of all recipes share: columns, the row of an arm, shared settings and environment."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanproof_recipes.comparison.comparison import Arm, Column
from nanproof_recipes.folders import RECORDS
from nanproof_recipes.library import environment
from nanproof_recipes.results import BaseResult

if TYPE_CHECKING:
    import torch

GRAD_NORM = Column("grad_norm", "grad_norm", note="The last that was logged.")
NONFINITE = Column("nonfinite", "NaN tensors", "text", note="Trainable tensors that are not finite at the end, of all.")
REFUSED = Column("refused", "refused", "count", note="Attempts at a step that the guard refused; a healed one is run again.")
SKIPPED = Column("skipped", "skipped", "count", note="Steps that were not taken in the end.")
ROLLED_BACK = Column("rolled_back", "rolled back", "count")


def row(out: Path, result: BaseResult, says: str, columns: Iterable[Column], **other: Any) -> Arm:
    """Return the row of an arm. What was not trained has no counts. `other` replaces what is taken from the result."""
    run, trained = f"{result.name}/{RECORDS}", result.tensors is not None
    values = {c.key: getattr(result, c.key) if trained or c.form != "count" else None for c in columns}
    values["nonfinite"] = f"{result.nonfinite}/{result.tensors}" if trained else None
    found = {"values": values, "story": tuple(result.notes), "curves": dict(result.curves), "samples": tuple(result.samples)}
    kept = run if (out / run).is_dir() else None
    return Arm(name=result.name, setting=says, ending=result.ending, run=kept, **{**found, **other})


def around(results: Iterable[BaseResult], device: torch.device) -> dict[str, Any]:
    """Return what a comparison has besides its arms: the settings that all trained arms share, and the environment."""
    first, *others = [result.setting for result in results if result.tensors is not None] or [{}]
    shared = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    return {"settings": shared, "environment": environment(device)}
