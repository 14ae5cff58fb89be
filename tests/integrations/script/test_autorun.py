"""`nanproof run` on scripts that know nothing of it, each in a process of its own: the same weights while nothing is wrong, and
none of them spoiled when something is."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import forked
from nanproof import read_incidents, read_steps

ROOT = Path(__file__).parents[3]
PLAIN = str(ROOT / "examples" / "plain_loop.py")
MANY = str(Path(__file__).parent / "many_optimizers.py")


def python(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error,ignore::UserWarning:torch"}
    done = subprocess.run([sys.executable, *args], capture_output=True, text=True, cwd=cwd, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def protected(*args: str, cwd: Path) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
    done = python("-m", "nanproof", "run", "--json", *args, cwd=cwd)
    return done, json.loads(done.stderr.strip().splitlines()[-1])["guarded"]


def protected_late(*args: str, cwd: Path) -> tuple[subprocess.CompletedProcess[str], list[dict]]:
    """Where torch is imported before the script is started."""
    strict = ["-W", "error", "-W", "ignore::UserWarning"]
    done = forked.python(*strict, "-m", "nanproof", "run", "--json", *args, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done, json.loads(done.stderr.strip().splitlines()[-1])["guarded"]


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def finite(state: dict) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in state.values())


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The plain loop without nanproof."""
    folder = tmp_path_factory.mktemp("plain")
    done = forked.python(PLAIN, "--out", "out.pt", cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout, torch.load(folder / "out.pt")


def test_a_healthy_loop_ends_in_the_same_bits(plain, tmp_path):
    """Accumulation, clipping, a learning rate set by hand: what it prints, its weights, and its checkpoint."""
    done, guarded = protected(PLAIN, "--out", "out.pt", cwd=tmp_path)
    said, saved = plain
    out = torch.load(tmp_path / "out.pt")
    assert done.stdout == said
    assert same(out["model"], saved["model"])
    assert out["optimizer"]["param_groups"] == saved["optimizer"]["param_groups"]
    for i, state in saved["optimizer"]["state"].items():
        assert same(out["optimizer"]["state"][i], state)
    (one,) = guarded
    assert (one["name"], one["steps"], one["refused"], one["incidents"]) == ("AdamW", 40, 0, [])
    assert one["own_seconds"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.pt"], "nothing is written that was not asked for"


def test_a_bad_batch_is_refused_and_explained(tmp_path):
    """The step is named, with the micro-batch, the sample and the cause; the records are as of any guard."""
    done, (one,) = protected_late("--run-dir", "records", PLAIN, "--out", "out.pt", "--bad-step", "12", cwd=tmp_path)
    out = torch.load(tmp_path / "out.pt")
    assert finite(out["model"])
    assert out["optimizer"]["state"][0]["step"] == 39, "one step was not taken"
    (incident,) = one["incidents"]
    assert (incident["step"], incident["kind"], incident["action"]) == (12, "nonfinite-loss", "skipped")
    assert incident["micro_batch"] == 1
    assert incident["diagnosis"]["cause"] == "nonfinite-batch" and incident["diagnosis"]["samples"] == [2]
    assert one["refused"] == 1 and one["steps"] == 40
    assert [i.step for i in read_incidents(tmp_path / "records")] == [12]
    assert (tmp_path / "records" / "steps.jsonl").exists() and Path(incident["bundle"]).is_dir()
    records = list(read_steps(tmp_path / "records"))
    assert len(records) == 40
    norm = float(re.search(r"step 9: .* gradient norm (\S+)", done.stdout)[1])
    assert records[9].grad_norm == pytest.approx(norm, abs=1e-4), "the norm before clipping"
    assert records[9].clip == pytest.approx(max(norm, 1), rel=1e-4)


def test_the_document_shows_what_is_printed(tmp_path):
    """The sample of scripts.md, word for word and in this order; numbers may differ, and "..." stands for anything."""
    shown = re.findall(
        r"```\n\$ nanproof run (.*?)\n(.*?)```", (ROOT / "docs" / "frameworks" / "scripts.md").read_text(), flags=re.DOTALL
    )
    ((command, sample),) = shown
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "PYTHONUNBUFFERED": "1"}
    args = [PLAIN if word == "train.py" else word for word in command.split()]
    run = [sys.executable, "-m", "nanproof", "run", *args]
    done = subprocess.run(
        run, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path, env=environment, timeout=120
    )
    assert done.returncode == 0, done.stdout

    def words(text: str) -> str:
        return " ".join(text.replace("nanproof: ", " ").split())

    pattern = re.sub(r"\d+\\\.\d+", r"\\d+\\.\\d+", re.escape(words(sample))).replace(r"\.\.\.", ".*")
    assert re.fullmatch(pattern, words(done.stdout)), done.stdout
    assert max(map(len, done.stdout.split("AdamW of GPT")[1].splitlines())) <= 120


def test_the_documented_recipe_runs_a_bundle_again(tmp_path):
    """The lines of scripts.md, pasted into a script and into a shell."""
    section = (ROOT / "docs" / "frameworks" / "scripts.md").read_text().partition("## A bundle, run again")[2].partition("## ")[0]
    (lines,) = re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL)
    (commands,) = re.findall(r"```bash\n(.*?)```", section, flags=re.DOTALL)
    (tmp_path / "train.py").write_text(Path(PLAIN).read_text() + lines)
    train, replay = (forked.python("-m", *line.split(), cwd=tmp_path) for line in commands.strip().splitlines())
    assert (train.returncode, replay.returncode) == (0, 1), train.stderr + replay.stderr
    assert "nonfinite-batch" in replay.stdout and "as recorded" in replay.stdout


ACCUMULATED = """
import torch
from torch import nn

import nanproof


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 1)

    def forward(self, x):
        return {"loss": self.body(x).square().mean() + (self.body(x) * x[:, :1]).abs().sqrt().mean()}


def build():
    return {"model": Root(), "loss_fn": nanproof.call_again}


if __name__ == "__main__":
    torch.manual_seed(0)
    model = Root()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(4):
        for part in range(4):
            x = torch.randn(4, 4)
            x[0, 0] = 0.0 if (step, part) == (2, 3) else x[0, 0]
            (model(x)["loss"] / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def test_an_accumulated_step_is_replayed_with_its_own_numbers(tmp_path):
    """The loss that the loop divided is not divided a second time."""
    (tmp_path / "train.py").write_text(ACCUMULATED)
    forked.python("-m", "nanproof", "run", "--run-dir", "records", "train.py", cwd=tmp_path)
    bundle = next((tmp_path / "records" / "incidents").iterdir())
    done = forked.python("-m", "nanproof", "replay", bundle, "--entry", "train:build", "--json", cwd=tmp_path)
    result = json.loads(done.stdout)
    assert (result["kind"], result["verdict"], result["same_as_recorded"]) == ("nonfinite-gradient", "persistent", True)


def test_verdicts_that_come_late(tmp_path):
    """As on CUDA: the script saves two steps after a bad one, before its verdict was read, and what it saves holds the step that
    was held up behind the bad one."""
    late = ["--optimizer", "fused", "--policy", "lag=2"]
    _, (one,) = protected_late(*late, PLAIN, "--steps", "14", "--bad-step", "12", "--out", "out.pt", cwd=tmp_path)
    out = torch.load(tmp_path / "out.pt")
    assert finite(out["model"]) and out["optimizer"]["state"][0]["step"] == 13
    assert one["path"] == "device: AdamW switched to fused"
    assert [(i["step"], i["action"]) for i in one["incidents"]] == [(12, "skipped")]


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """Every kind of optimizer: without nanproof, with it, and with it and a bad step."""
    folder = tmp_path_factory.mktemp("many")
    without = forked.python(MANY, "without.pt", "-1", cwd=folder)
    assert without.returncode == 0, without.stderr
    healthy = protected_late(MANY, "with.pt", "-1", cwd=folder)
    bad = protected_late(MANY, "bad.pt", "7", cwd=folder)
    states = {name: torch.load(folder / f"{name}.pt") for name in ("without", "with", "bad")}
    return without, healthy, bad, states


@pytest.mark.parametrize("name", ["rmsprop", "sgd", "lion", "closure", "scaler", "fused", "two", "none", "lbfgs"])
def test_every_optimizer_ends_in_the_same_bits(many, name):
    """RMSprop, SGD under a schedule, one made by hand, a closure, a GradScaler over fp16 (fused and not), two optimizers clipped
    part by part, tensors of no module, and LBFGS."""
    *_, states = many
    assert same(states["without"][name], states["with"][name])


def test_what_the_scripts_print_is_the_same(many):
    """Losses, norms before clipping, loss scales and the count of closures, to the last bit."""
    without, (healthy, _), _, _ = many
    assert healthy.stdout == without.stdout


def test_no_optimizer_takes_the_bad_step(many):
    """Nine guards, nine refused steps: weights, moments and running statistics stay finite, and the cause is found."""
    _, (_, healthy), (_, guarded), states = many
    names = ["RMSprop", "SGD", "Lion", "Adam", "AdamW", "AdamW", "AdamW and SGD", "Adam", "LBFGS"]
    assert [g["name"] for g in healthy if g["guarded"]] == names
    assert [g["name"] for g in guarded] == names
    assert all(g["refused"] == 0 and g["incidents"] == [] for g in healthy)
    for name, state in states["bad"].items():
        assert finite(state), name
    for one in guarded:
        assert [(i["step"], i["kind"]) for i in one["incidents"]] == [(7, "nonfinite-loss")], one["name"]
        assert (one["name"], one["steps"], one["refused"]) == (one["name"], 12, 1)
    causes = [one["incidents"][0]["diagnosis"]["cause"] for one in guarded]
    assert causes == ["nonfinite-batch"] * 9, "also where a loss is not computed by a module"
    assert [g["model"] for g in guarded] == ["Model"] * 7 + ["", "Model"]
    culprits = [[name for name, _ in one["incidents"][0]["culprits"]] for one in guarded]
    assert "body.0.weight" in culprits[0] and culprits[6][-1] == "head.bias" and culprits[7] == ["group0_0"]


def test_a_gradscaler_looks_for_its_scale_undisturbed(many):
    """Overflows on the way are no incidents; they are counted."""
    _, (_, healthy), _, _ = many
    assert [g["overflows"] for g in healthy if g["name"] == "AdamW"][:2] == [healthy[4]["overflows"]] * 2
    assert healthy[4]["overflows"] > 0
