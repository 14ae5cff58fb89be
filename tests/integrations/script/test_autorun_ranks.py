"""`torchrun -m nanproof run`: two ranks, one script that knows nothing of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import forked
from nanproof import read_incidents

SCRIPT = str(Path(__file__).parent / "script_on_two_ranks.py")


@pytest.mark.parametrize("kind", ["ddp", "shard"])
def test_two_ranks_under_nanproof_run(tmp_path, kind):
    """DistributedDataParallel and fully_shard, and loaders with workers: both ranks refuse the step that was bad on one of them;
    rank 0 tells which, and which sample it was. Under torchrun itself, and started as it starts them."""
    words = ["-m", "nanproof", "run", "--run-dir", "records", SCRIPT, kind, "out", "27"]
    if kind == "ddp":
        launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [subprocess.run(launch, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=120)]
    else:
        ranks = forked.two_ranks_of(*words, cwd=tmp_path)
    said = "".join(rank.stderr for rank in ranks)
    assert all(rank.returncode == 0 for rank in ranks), said
    first, second = (torch.load(tmp_path / f"out-{rank}.pt") for rank in (0, 1))
    assert all(torch.equal(first[name], second[name]) and bool(torch.isfinite(first[name]).all()) for name in first)
    (incident,) = read_incidents(tmp_path / "records")
    assert (incident.step, incident.rank) == (3, 1)
    assert incident.diagnosis.cause == "one-rank-nonfinite" and incident.diagnosis.samples == (1,)
    assert "body.0.weight" in dict(incident.culprits)
    assert said.count("8 steps, 1 refused") == 1
