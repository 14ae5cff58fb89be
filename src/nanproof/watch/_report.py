"""The report of a run that is watched, written when a key is pressed."""

from __future__ import annotations

from pathlib import Path

from nanproof.report._out import put
from nanproof.report.folder._run import Run


def written(folder: Path) -> Path:
    """Write `report.html` into the run's folder: with all of its text, or not at all."""
    from nanproof.report._html import page

    path = folder / "report.html"
    put(path, page(Run(folder).read()), folder)
    return path
