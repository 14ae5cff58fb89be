"""`nanproof check module:build`, as a user runs it."""

from __future__ import annotations

import json
import sys

import pytest
from typer.testing import CliRunner

import forked
from nanproof.cli import app

CODE = """
import torch
from torch import nn

def build(bad=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    if bad:
        model[0] = nn.Linear(4, 8)
    batches = [torch.randn(5, 4) for _ in range(3)]
    print("noise of the user's own")
    return {"model": model, "optimizer": optimizer, "loss_fn": lambda m, x: m(x).square().mean(), "batches": batches}

def broken():
    return build(bad=True)

def nothing():
    return {"model": build()["model"], "loss_fn": lambda m, x: m(x).mean()}
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    """The command in this process, in the folder of the user's module."""
    (tmp_path / "mine.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield lambda *args: CliRunner().invoke(app, ["check", *args])
    sys.modules.pop("mine", None)


def test_a_healthy_start(check):
    done = check("mine:build")
    assert done.exit_code == 0 and done.stdout.startswith("nothing found") and "noise" in done.stderr


def test_something_found(check, tmp_path):
    done = check("mine:broken")
    assert done.exit_code == 1
    assert "optimizer-foreign-parameters" in done.stdout and "Build the optimizer after" in done.stdout
    done = forked.python("-m", "nanproof", "check", "mine:broken", "--json", cwd=tmp_path)
    assert done.returncode == 1 and "noise" in done.stderr
    found = json.loads(done.stdout)["found"]
    assert found[0]["cause"] == "optimizer-foreign-parameters" and found[0]["verified"]


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("mine", "names no function"),
        ("mine:gone", "no function 'gone'"),
        ("no_such:x", "cannot be imported"),
        ("mine:nothing", "no 'optimizer'"),
    ],
)
def test_what_cannot_run(check, entry, said):
    done = check(entry)
    assert done.exit_code == 2 and said in done.stderr and "hint:" in done.stderr and done.stdout == ""
