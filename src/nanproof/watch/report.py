"""The report of a run that is watched, where this version can write one."""

from __future__ import annotations

from pathlib import Path

from nanproof.report.run import Run


def written(folder: Path) -> Path:
    """Write `report.html` into the run's folder."""
    from nanproof.report.html import page  # type: ignore[import-not-found]

    path = folder / "report.html"
    path.write_text(page(Run(folder).read()), encoding="utf-8")
    return path
