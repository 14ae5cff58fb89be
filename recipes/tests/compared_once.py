"""A recipe's `compare`, run once a test run: tests look at the folder it left and at what it printed."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from once import made_once


@dataclass(frozen=True)
class Said:
    """How the command ended, and what it printed."""

    exit_code: int
    output: str
    stdout: str
    stderr: str


@dataclass(frozen=True)
class Compared:
    """A folder with all arms that a test may change, the folder it was trained in, and what the command said there."""

    out: Path
    trained: Path
    said: Said


def compared_once(factory: pytest.TempPathFactory, name: str, words: list[str]) -> Compared:
    """Return what `nanproof recipe words...` left in its folder; the first worker that asks runs it."""

    def compare(folder: Path) -> None:
        from typer.testing import CliRunner

        from nanproof.cli import app

        found = CliRunner().invoke(app, ["recipe", *words, "--out", str(folder / "out")])
        said = Said(found.exit_code, found.output, found.stdout, found.stderr)
        (folder / "said.json").write_text(json.dumps(asdict(said)))

    trained, own = made_once(factory, name, compare)
    return Compared(own / "out", trained / "out", Said(**json.loads((own / "said.json").read_text())))
