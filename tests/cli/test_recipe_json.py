"""`nanproof recipe units-sft ... --json` prints one JSON object on standard output, whatever else is said."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

for package in ("transformers", "peft", "accelerate"):
    pytest.importorskip(package)


def test_train_prints_json_and_nothing_else(tmp_path):
    """A package that prints when it is imported does not spoil it: peft is made to, as DeepSpeed does on its own."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Noise:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'peft':\n"
        "            print('noise while a package is imported')\n"
        "sys.meta_path.insert(0, Noise())\n",
        encoding="utf-8",
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    asked = ["--model", "tiny", "--train", "8", "--valid", "2", "--epochs", "1", "--out", str(tmp_path / "out"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "nanproof", "recipe", "units-sft", "train", *asked],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["name"] == "fixed"
    assert "noise while" in done.stderr
