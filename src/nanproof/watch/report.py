"""The report of a run that is watched, written when a key is pressed."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from nanproof.report.run import Run


def written(folder: Path) -> Path:
    """Write `report.html` into the run's folder: with all of its text, or not at all."""
    from nanproof.report.html import page

    path = folder / "report.html"
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(page(Run(folder).read()), encoding="utf-8", newline="\n")
        os.replace(partial, path)
    finally:
        with suppress(OSError):
            partial.unlink()
    return path
