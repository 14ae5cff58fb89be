"""`nanproof replay` runs a bundle's step again exactly, says what came of it, and exits accordingly."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import forked
from nanproof import Incident
from nanproof.cli import app
from nanproof.core.support._context import Mode, RandomState
from nanproof.explain.bundle._bundle import BundleWriter
from nanproof.explain.replay._replay import Replay

ENTRY = """
import torch
from torch import nn

def loss_fn(model, batch):
    return (model(batch["x"]) - batch["y"]).log().mean() if batch["log"] else (model(batch["x"]) - batch["y"]).square().mean()

def build():
    print("building")  # must not get into the output
    torch.manual_seed(99)  # other weights than those recorded
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 1))
    model.eval()  # the recorded mode is training
    return {"model": model, "loss_fn": loss_fn, "optimizer": torch.optim.AdamW(model.parameters(), lr=1.0)}

class Built:
    def __init__(self):
        self.__dict__.update(build())

def narrow():
    return {**build(), "model": nn.Linear(6, 1)}

def wide():
    return {**build(), "model": nn.Sequential(nn.Linear(7, 16), *build()["model"][1:])}

def more():
    return {**build(), "model": nn.Sequential(*build()["model"], nn.Linear(1, 1))}

def fails():
    raise KeyError("no data")

def no_model():
    return {"loss_fn": loss_fn}

def no_loss():
    return {"model": nn.Linear(1, 1)}

text = "no function"
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with the user's module, and what is in it."""
    name = f"project_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(ENTRY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return __import__(name)


def make(project, *, log=False, bad=False, incident=None, device="cpu", **more):
    """A step of a model in training, as recorded, and its outcome in this process."""
    built = project.build()
    model, optimizer = built["model"].train().to(device), built["optimizer"]
    torch.manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.5)
    batch = {"x": torch.randn(8, 6).to(device), "y": torch.randn(8, 1).to(device), "log": log}
    loss = project.loss_fn(model, batch)
    loss.backward()
    optimizer.param_groups[0]["lr"] = 0.25
    optimizer.step()
    if bad:
        batch["x"][3, 2] = math.nan
    torch.rand(7)
    first = next(model.parameters()).device
    random = RandomState.now([first] if first.type == "cuda" else []).only({"cpu", "python", str(first)})
    mode = Mode.now(list(model.modules()), first)
    outcome = Replay(model, project.loss_fn, [batch], random=random, mode=mode).run()
    if incident is None:
        incident = Incident(step=41, kind="nonfinite-loss", action="skipped", loss=outcome.loss, grad_norm=outcome.total)
    writer = BundleWriter(Path("incidents"), **more)
    path = writer.write(incident=incident, batches=[batch], random=random, mode=mode, model=model, optimizer=optimizer)
    writer.close()
    return path, outcome, project.__name__


def run(path, entry, *arguments):
    return CliRunner().invoke(app, ["replay", str(path), "--entry", entry, *arguments])


def fresh(path, entry, *arguments):
    code = "import torch; torch.set_num_threads(2); from nanproof.cli import app; app()"
    return forked.python("-c", code, "replay", path, "--entry", entry, *arguments)


def strict(text):
    return json.loads(text, parse_constant=lambda c: pytest.fail(c))


def test_a_fresh_process_gets_the_same_loss_and_norms_bit_for_bit(project):
    """Dropout, batch norm, weights and threads come from the bundle; nothing of this process is at hand there."""
    path, outcome, name = make(project)
    result = fresh(path, f"{name}:build", "--json")
    assert result.returncode == 0, result.stderr
    said = strict(result.stdout)
    assert [r["loss"] for r in said["runs"]] == [outcome.loss] * 2
    assert said["runs"][0]["norms"] == outcome.norms and len(outcome.norms) == 6
    assert said["same_as_recorded"] is True and said["same_twice"] is True and said["verdict"] == "transient"
    assert said["diagnosis"] is None and "building" in result.stderr


def test_a_step_that_is_still_bad_is_diagnosed_and_exits_with_1(project):
    path, _, name = make(project, bad=True)
    result = fresh(path, f"{name}:build", "--json")
    assert result.returncode == 1, result.stderr
    said = strict(result.stdout)
    assert said["verdict"] == "persistent" and said["bad"] is True and said["same_as_recorded"] is True
    assert said["runs"][0]["loss"] == "nan" and said["step"] == 41 and said["kind"] == "nonfinite-loss"
    assert said["diagnosis"]["cause"] == "nonfinite-batch" and said["diagnosis"]["samples"] == [3]


def test_people_are_told_cause_place_evidence_and_fix(project, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    path, _, name = make(project, log=True)
    result = run(path, f"{name}:build")
    assert result.exit_code == 1, result.output
    lines = [line.split("  ")[0] for line in result.stdout.splitlines()]
    for word in ("recorded", "run again", "and again", "verdict", "cause", "place", "source", "evidence", "fix", "verified"):
        assert word in lines, result.stdout
    assert "persistent: bad both times, as recorded" in result.stdout and "step 41: nonfinite-loss" in result.stdout
    assert "log" in result.stdout and "building" not in result.stdout and "\x1b[" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_a_fault_that_does_not_come_again_is_transient_and_exits_with_0(project):
    bad = Incident(step=3, kind="nonfinite-loss", action="skipped", loss=math.nan, grad_norm=math.nan)
    path, outcome, name = make(project, incident=bad)
    result = run(path, f"{name}:build")
    assert result.exit_code == 0, result.output
    assert "finite now" in result.stdout and "cause" not in result.stdout and f"loss {outcome.loss:.4g}" in result.stdout


def test_a_spike_is_still_bad_if_its_numbers_come_again(project):
    """Finite is what a spike always was."""
    _, outcome, name = make(project)
    spike = Incident(step=3, kind="spike", action="clipped", loss=outcome.loss, grad_norm=outcome.total)
    same, _, _ = make(project, incident=spike)
    result = run(same, f"{name}:build", "--json")
    assert result.exit_code == 1 and strict(result.stdout)["verdict"] == "persistent"
    other, _, _ = make(project, incident=replace(spike, grad_norm=outcome.total * 50))
    assert run(other, f"{name}:build").exit_code == 0


def test_an_object_with_attributes_is_as_good_as_a_dictionary(project):
    path, outcome, name = make(project)
    result = run(path, f"{name}:Built", "--json")
    assert result.exit_code == 0 and strict(result.stdout)["runs"][0]["loss"] == outcome.loss


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{name}", "names no function"),
        ("{name}:", "names no function"),
        ("missing_module:build", "cannot be imported (ModuleNotFoundError"),
        ("{name}:nothing", "has no function 'nothing'"),
        ("{name}:text", "has no function 'text'"),
        ("{name}:fails", "fails() failed (KeyError: 'no data')"),
        ("{name}:no_model", "its 'model' is NoneType"),
        ("{name}:no_loss", "its 'loss_fn' is NoneType"),
        ("{name}:narrow", "has no weight, which the model has"),
        ("{name}:more", "has no 5.weight, which the model has"),
        ("{name}:wide", "0.weight is [16, 6] in"),
    ],
)
def test_what_cannot_run_is_an_error_with_a_hint_and_exits_with_2(project, entry, words):
    path, _, name = make(project)
    result = run(path, entry.format(name=name), "--json")
    assert result.exit_code == 2 and result.stdout == ""
    assert words in result.stderr
    lines = result.stderr.splitlines()
    assert lines[-2].startswith("error: ") and lines[-1].startswith("hint: ")


def test_a_weight_that_the_model_does_not_have_is_named(project, monkeypatch):
    path, _, name = make(project)
    monkeypatch.setattr(project, "build", lambda: {"model": nn.Sequential(nn.Linear(6, 16)), "loss_fn": project.loss_fn})
    result = run(path, f"{name}:build")
    assert result.exit_code == 2 and "has 1.bias, which the model has not" in result.stderr


def test_a_damaged_bundle_is_an_error_with_a_hint(project):
    path, _, name = make(project)
    with open(path / "weights.safetensors", "ab") as file:
        file.write(b"x")
    result = run(path, f"{name}:build")
    assert result.exit_code == 2 and "weights.safetensors has" in result.stderr
    assert result.stderr.splitlines()[-1] == "hint: Copy the whole folder again from where it was written"
    assert run("nowhere", f"{name}:build").exit_code == 2


def test_a_bundle_without_weights_takes_those_of_the_entry_and_says_so(project):
    path, outcome, name = make(project, max_bytes=10_600)
    assert not (path / "weights.safetensors").exists()
    result = run(path, f"{name}:build", "--json")
    assert result.exit_code == 0, result.output
    assert "note: the bundle has no weights" in result.stderr and "note: not in the bundle: weights" in result.stderr
    assert strict(result.stdout)["runs"][0]["loss"] != outcome.loss


def test_the_optimizer_is_given_the_recorded_settings_and_moments(project, monkeypatch):
    path, _, name = make(project)
    seen = {}
    build = project.build
    monkeypatch.setattr(project, "build", lambda: seen.update(build()) or seen)
    assert run(path, f"{name}:build").exit_code == 0
    optimizer = seen["optimizer"]
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert all(
        float(optimizer.state[p]["step"]) == 1 and optimizer.state[p]["exp_avg"].any()
        for p in list(seen["model"].parameters())[-2:]
    )


def test_a_step_recorded_on_a_device_that_is_not_here_runs_on_the_cpu_and_says_so(project):
    path, outcome, name = make(project)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["device"], manifest["device_name"] = "cuda:5", "NVIDIA H200"
    manifest["batches"][0]["dict"][0][1]["device"] = "cuda:5"
    manifest["random"]["dict"].append(["cuda:5", manifest["random"]["dict"][1][1]])
    (path / "manifest.json").write_text(json.dumps(manifest))
    if torch.cuda.is_available():
        pytest.skip("there is one")
    result = run(path, f"{name}:build", "--json")
    assert result.exit_code == 0, result.output
    assert "recorded on cuda:5 (NVIDIA H200), which is not here: it runs on the CPU" in result.stderr
    assert strict(result.stdout)["runs"][0]["loss"] == outcome.loss


@pytest.mark.gpu
def test_a_step_recorded_on_cuda_is_the_same_bit_for_bit_there(project):
    """The entry builds on the CPU: model, batch and the device's random numbers go where they were."""
    path, outcome, name = make(project, device="cuda")
    said = strict(fresh(path, f"{name}:build", "--json").stdout)
    assert said["runs"][0]["loss"] == outcome.loss and said["runs"][0]["norms"] == outcome.norms and said["notes"] == []


def test_an_exception_comes_again(project, monkeypatch):
    raised = Incident(step=3, kind="exception", action="recorded", message="ValueError: odd")
    path, _, name = make(project, incident=raised)

    def odd(model, batch):
        raise ValueError("odd")

    built = project.build()
    monkeypatch.setattr(project, "build", lambda: {**built, "loss_fn": odd})
    result = run(path, f"{name}:build")
    assert result.exit_code == 1 and "ValueError: odd" in result.stdout and "as recorded" in result.stdout


def test_help_names_the_command():
    result = CliRunner().invoke(app, ["--help"])
    assert "replay" in result.stdout and CliRunner().invoke(app, ["replay"]).exit_code == 2
