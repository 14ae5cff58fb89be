"""`torchrun -m nanproof run`: two ranks, one script that knows nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from nanproof.records import read_incidents

SCRIPT = str(Path(__file__).parent / "scripts" / "two_ranks.py")


def test_two_ranks_under_torchrun(tmp_path):
    """DistributedDataParallel, and loaders with workers: both ranks refuse the step that was bad on one, and rank 0 tells."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "nanproof", "run"]
    done = subprocess.run(
        [*launch, "--run-dir", "records", SCRIPT, "out", "27"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, second = (torch.load(tmp_path / f"out-{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) and bool(torch.isfinite(first[name]).all()) for name in first)
    assert [(i.step, i.rank) for i in read_incidents(tmp_path / "records")] == [(3, 1)]
    assert done.stderr.count("8 steps, 1 refused") == 1
