"""A slice of the kill campaign: `make campaign` runs the whole of it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="lives are forked")
def test_no_kill_loses_a_good_checkpoint_and_no_damaged_one_is_loaded(tmp_path):
    """Killed and damaged in a process of its own, which has to fork: every start resumes from the newest good checkpoint that an
    independent reader finds, with the bits of the undisturbed run, and every end is that run's end."""
    found = tmp_path / "found.json"
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "zoo.kills",
        "--kills",
        "8",
        "--damaged",
        "6",
        "--ranks",
        "0",
        "--no-disks",
    ]
    done = subprocess.run(
        [*command, "--steps", "60", "--json", str(found)], capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    killed, damaged = json.loads(found.read_text()).values()
    assert killed["trials"] == 8 and killed["ends"] == killed["identical"] >= 1
    assert damaged["trials"] == damaged["resumed_good"] == damaged["identical"] == 6
    for part in (killed, damaged):
        assert part["resumed_good"] == part["resumes"] >= 1
        assert (part["lost"], part["bad_loads"], part["problems"]) == (0, 0, [])
