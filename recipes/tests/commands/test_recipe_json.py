"""`nanproof recipe units-sft ... --json` prints one JSON object on standard output, whatever else is said."""

from __future__ import annotations

import json

import pytest

import forked

for package in ("transformers", "peft", "accelerate"):
    pytest.importorskip(package)

CODE = """
import sys
from pathlib import Path

from taught import share

share(Path(sys.argv.pop(1)))
assert "peft" not in sys.modules


class Noise:
    def find_spec(self, name, path=None, target=None):
        if name == "peft":
            print("noise while a package is imported")


sys.meta_path.insert(0, Noise())

from nanproof.cli import app

app()
"""


def test_train_prints_json_and_nothing_else(tmp_path, taught):
    """A package that prints when it is imported does not spoil it: peft is made to, as DeepSpeed does on its own."""
    asked = ["--model", "tiny", "--train", "8", "--valid", "2", "--epochs", "1", "--out", tmp_path / "out", "--json"]
    done = forked.python("-c", CODE, taught, "recipe", "units-sft", "train", *asked)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "fixed"
    assert "noise while" in done.stderr
