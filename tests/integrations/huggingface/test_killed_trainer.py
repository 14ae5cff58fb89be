"""A slice of the campaign that kills a Trainer: `python -m zoo.kills.trainer` runs the whole of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="lives are forked")
@pytest.mark.parametrize(("kills", "terms"), [(4, 2), pytest.param(24, 12, marks=pytest.mark.slow)])
def test_a_killed_trainer_resumes_and_ends_as_if_nothing_had_happened(tmp_path, kills, terms):
    """Every start goes on from the newest checkpoint that an independent reader finds whole, with the bits of the undisturbed
    run. After SIGTERM no step is taken twice."""
    found = tmp_path / "found.json"
    counts = ["--kills", str(kills), "--terms", str(terms), "--steps", "20", "--seed", str(kills)]
    command = [sys.executable, "-W", "ignore", "-m", "zoo.kills.trainer", *counts]
    done = subprocess.run([*command, "--json", str(found)], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    parts = json.loads(found.read_text())
    for name, part in parts.items():
        assert part["trials"] == (kills if "KILL" in name else terms) // 2 and part["ends"] == part["identical"] >= 1
        assert part["resumed_good"] == part["resumes"] >= 1
        assert (part["lost"], part["bad_loads"], part["failed"], part["problems"]) == (0, 0, 0, [])
    assert sum(part["steps_lost"] for name, part in parts.items() if "TERM" in name) == 0
