"""Checkpoints and quarantined samples as they lie on the disk, written by the real thing."""

from __future__ import annotations

import json

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import nanproof
from nanproof.report.folder._beside import checkpoints, quarantine


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with good checkpoints, a candidate, and one sample in quarantine."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("run")
    x = torch.randn(64, 4)
    x[10, 0] = float("inf")
    model = torch.nn.Linear(4, 1)
    guard = nanproof.Guard(
        model,
        torch.optim.AdamW(model.parameters()),
        loss_fn=lambda model, batch: model(batch[0]).square().mean(),
        policy=nanproof.Policy(salvage=True),
        checkpoints=nanproof.Checkpoints(folder / "checkpoints", every=10, prove=5, background=False),
        run_dir=folder,
    )
    loader = guard.wrap(DataLoader(TensorDataset(x), 8))
    for _ in range(4):
        for batch in loader:
            guard.train_step(batch)
    guard.close()
    return folder


def test_states_are_those_of_the_store(run):
    found = checkpoints(run)
    assert [(saved.step, saved.state) for saved in found] == [(10, "good"), (20, "good"), (30, "candidate")]
    there = run / "checkpoints" / "step-00000010"
    files = json.loads((there / "manifest.json").read_text())["files"]
    assert found[0].size == sum((there / name).stat().st_size for name in files) and found[0].at.startswith("20")


@pytest.mark.parametrize("what", ["cut", "gone", "manifest", "other manifest", "outside"])
def test_a_broken_checkpoint_is_told_from_a_good_one(run, what, tmp_path):
    import shutil

    shutil.copytree(run / "checkpoints", tmp_path / "checkpoints")
    there = tmp_path / "checkpoints" / "step-00000020"
    part = next(there.glob("*.distcp"))
    manifest = there / "manifest.json"
    if what == "cut":
        part.write_bytes(part.read_bytes()[:-1])
    elif what == "gone":
        part.unlink()
    elif what == "manifest":
        manifest.write_text("{")
    elif what == "other manifest":
        manifest.write_text(manifest.read_text() + "\n")
    else:
        data = json.loads(manifest.read_text())
        manifest.write_text(json.dumps({**data, "files": {"../../../../etc/passwd": {"bytes": 1}}}))
    states = {saved.step: saved for saved in checkpoints(tmp_path)}
    assert states[10].state == "good" and states[20].state == "broken" and states[20].why


def test_those_of_a_trainer_are_found_beside_the_run(tmp_path):
    for step, state in ((10, "good"), (20, "suspect"), (30, "candidate"), (40, 3)):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        (folder / "nanproof.json").write_text(json.dumps({"version": 1, "state": state, "step": step}))
    (tmp_path / "checkpoint-50").mkdir()
    (tmp_path / "nanproof").mkdir()
    assert [saved.state for saved in checkpoints(tmp_path / "nanproof")] == ["good", "suspect", "candidate", "broken"]


def test_quarantined_samples(run, tmp_path):
    (entry,) = quarantine(run)
    assert entry["index"] == 10 and entry["cause"] == "nonfinite-batch"
    line = (run / "quarantine.jsonl").read_text()
    (tmp_path / "quarantine.jsonl").write_text("[]\nx\n{}\n" + line + '{"step": 1, "index": "\\u202e", "cause": 3}\n' + line[:20])
    found = quarantine(tmp_path)
    assert found[0] == entry and found[1]["index"] == "\\u202e" and len(found) == 2
    assert quarantine(tmp_path / "missing") == []
