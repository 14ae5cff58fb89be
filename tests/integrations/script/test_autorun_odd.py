"""`nanproof run` on scripts that do what scripts do: losses of their own, copies, pickles, sweeps, recomputed activations."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import forked
from nanproof import Policy, read_steps
from nanproof.integrations.script._runs import ScriptRuns
from nanproof.integrations.script._session import Options, Session
from nanproof.integrations.script._trainers import _protect

SWEEP = """
import gc, math, weakref
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(6, 12), nn.Linear(12, 1)

    def forward(self, x, y):
        hidden = checkpoint(lambda x: torch.tanh(self.body(x)), x, use_reentrant=True)
        return (self.head(hidden) - y).square().mean()


alive = []
for run in range(3):
    torch.manual_seed(run)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    alive += [weakref.ref(model), weakref.ref(optimizer)]
    for step in range(70):
        x = torch.randn(8, 6)
        y = x.sum(dim=1, keepdim=True)
        if step == 65:
            x[2] = math.nan
        optimizer.zero_grad()
        loss = model(x.requires_grad_(), y)
        loss.backward()
        optimizer.step()
del model, optimizer, loss
gc.collect()
print(sum(reference() is not None for reference in alive))
"""


def protected(*args: str, cwd: Path) -> tuple[str, list[dict]]:
    done = forked.python("-W", "error", "-m", "nanproof", "run", "--json", *args, cwd=cwd)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(done.stderr.strip().splitlines()[-1])["guarded"]


def test_a_sweep_leaves_nothing_behind(tmp_path):
    """One model after the other: each has its guard, its records and its explanation, and goes when the script lets go of it. The
    backward inside a recomputed block is part of the one around it."""
    (tmp_path / "sweep.py").write_text(SWEEP)
    said, guarded = protected("--run-dir", "records", "sweep.py", cwd=tmp_path)
    assert said == "0\n"
    assert [(one["steps"], one["refused"]) for one in guarded] == [(70, 1)] * 3
    for one in guarded:
        incident = next(i for i in one["incidents"] if i["kind"] == "nonfinite-loss")
        assert incident["step"] == 65 and incident["micro_batch"] is None
        assert incident["diagnosis"]["cause"] == "nonfinite-batch" and incident["diagnosis"]["samples"] == [2]
    folders = [tmp_path / "records", *(tmp_path / "records" / f"optimizer-{i}" for i in (2, 3))]
    assert all(len(list(read_steps(folder))) == 70 for folder in folders)


def test_a_loss_of_the_scripts_own(tmp_path):
    """It is computed again by the script's own lines. And the script may copy and pickle what it likes."""
    script = tmp_path / "own_loss.py"
    script.write_text(
        "import copy, math, torch\n"
        "model = torch.nn.Linear(3, 1)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.1)\n"
        "for step in range(6):\n"
        "    x, y = torch.randn(4, 3), torch.randn(4, 1)\n"
        "    if step == 2: x[1, 0] = math.inf\n"
        "    if step == 4: y[3] = math.nan\n"
        "    optimizer.zero_grad()\n"
        "    torch.nn.functional.mse_loss(model(x), y).backward()\n"
        "    optimizer.step()\n"
        "    twin, other = copy.deepcopy(model), copy.deepcopy(optimizer)\n"
        "    torch.save(model, 'model.pt')\n"
        "    twin(x).sum().backward()\n"
        "print(bool(torch.isfinite(model.weight).all()))\n"
    )
    said, (one, *copies) = protected(str(script), cwd=tmp_path)
    assert all(copy["steps"] == 0 for copy in copies)
    assert said == "True\n" and [i["step"] for i in one["incidents"]] == [2, 4]
    first, second = (i["diagnosis"] for i in one["incidents"])
    assert (first["cause"], first["where"], first["samples"], first["verified"]) == ("nonfinite-batch", "batch['x']", [1], True)
    assert (second["cause"], second["where"], second["samples"], second["verified"]) == (
        "nonfinite-batch",
        "batch['y']",
        [3],
        True,
    )


ACCUMULATED = """
import math, torch
class Encoder(torch.nn.Linear): pass
class Decoder(torch.nn.Linear): pass
encoder, decoder = Encoder(3, 4), Decoder(4, 1)
optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], 0.01)
other = torch.optim.SGD(torch.nn.Linear(3, 1).parameters(), 0.01)
for step in range(14):
    optimizer.zero_grad()
    for part in range(3):
        x = torch.randn(4, 3)
        if 2 <= step < 8 and part == 1: x[3, 2] = math.nan
        decoder(encoder(x)).square().mean().backward()
    optimizer.step()
"""


def test_the_summary_tells_what_is_the_same_once(tmp_path):
    """Six refused steps of one cause are one entry, with the sample of the micro-batch that was bad; what one model gives to the
    next is no data. Lines are no longer than the terminal is wide."""
    (tmp_path / "accumulated.py").write_text(ACCUMULATED)
    run = ["-m", "nanproof", "run", "--run-dir", "r1", "accumulated.py"]
    done = forked.python(*run, cwd=tmp_path, env={**os.environ, "COLUMNS": "90"})
    assert done.returncode == 0, done.stderr
    live = [line for line in done.stderr.splitlines() if line.startswith("nanproof: step ")]
    assert [line.split(":")[1] for line in live] == [f" step {i}" for i in range(2, 8)]
    assert "micro-batch 1. cause: nonfinite-batch" in live[0] and "in batch['x'], sample 3" in live[0]
    bad = "not finite: sample 3 of the batch"
    more = ["once more", *(f"{i} more times" for i in range(2, 6))]
    assert live[1:] == [
        f"nanproof: step {3 + i}: nonfinite-loss, skipped: as at step 2, {text}; {bad}" for i, text in enumerate(more)
    ]
    told = done.stderr.split("nanproof: SGD of Encoder and Decoder: ")[1]
    assert all(len(line) <= 90 for line in told.splitlines())
    words = " ".join(told.replace("nanproof: ", " ").split())
    expected = (
        "14 steps, 6 refused (verdicts read on the host: its own form is kept)",
        "step 2: nonfinite-loss, skipped. the loss is nan",
        "cause: nonfinite-batch (fix verified on the replay), in batch['x'], sample 3.",
        "as at step 2, 5 more times: steps 3-7",
        "ms a step, which hardly grows with the model (here ",
        "records and bundles: r1",
    )
    places = [words.find(text) for text in expected]
    assert -1 not in places and places == sorted(places), words
    assert words.count("cause:") == 1


GAN = """
import math, torch
class Generator(torch.nn.Linear): pass
class Critic(torch.nn.Linear): pass
generator, critic = Generator(4, 6), Critic(6, 1)
og, od = torch.optim.Adam(generator.parameters()), torch.optim.Adam(critic.parameters())
for step in range(12):
    real, fake = torch.randn(8, 6), generator(torch.randn(8, 4))
    if step == 7: real[5, 1] = math.nan
    od.zero_grad(); (critic(fake.detach()).mean() - critic(real).mean()).backward(); od.step()
    og.zero_grad(); (-critic(fake).mean()).backward(); og.step()
"""


def test_two_optimizers_are_told_apart(tmp_path):
    """By their models. The NaN is found in what the critic was called with, not in the gradients it was left, although the
    statement that draws it is run again for the other thing it makes."""
    (tmp_path / "gan.py").write_text(GAN)
    _, guarded = protected("gan.py", cwd=tmp_path)
    by_model = {one["model"]: one for one in guarded}
    assert by_model.keys() == {"Generator", "Critic"} and {one["name"] for one in guarded} == {"Adam"}
    assert by_model["Generator"]["incidents"] == []
    (incident,) = by_model["Critic"]["incidents"]
    assert (incident["step"], incident["micro_batch"]) == (7, None)
    assert incident["diagnosis"]["cause"] == "nonfinite-batch" and incident["diagnosis"]["samples"] == [5]
    assert incident["diagnosis"]["where"] == "batch['real']" and incident["diagnosis"]["verified"]


TRAINED_BY_HAND = """
weight = torch.randn(3, requires_grad=True)
for step in range(5):
    (weight * torch.randn(3)).sum().square().backward()
    with torch.no_grad():
        weight -= 0.1 * weight.grad
    weight.grad = None
    print("step", step, file=sys.stderr)
"""
OPTIMIZER_NEVER_STEPS = """
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    model(torch.randn(4, 3)).square().mean().backward()
    for p in model.parameters():
        p.data -= 0.1 * p.grad
        p.grad = None
    print("step", step, file=sys.stderr)
"""
NO_GRADIENTS = """
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(5):
    optimizer.step()
    print("step", step, file=sys.stderr)
"""
GUARDED_BY_ITSELF = """
import nanproof
model = torch.nn.Linear(3, 1)
guard = nanproof.Guard(model, torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(5):
    loss = model(torch.randn(4, 3)).square().mean()
    loss.backward()
    guard.step(loss)
    guard.optimizer.zero_grad()
    print("step", step, file=sys.stderr)
"""


@pytest.mark.parametrize(
    ("script", "words", "step"),
    [
        (TRAINED_BY_HAND, "nothing is guarded so far", 2),
        (OPTIMIZER_NEVER_STEPS, "nothing is guarded so far", 2),
        (NO_GRADIENTS, "SGD", 2),
        (GUARDED_BY_ITSELF, "SGD is not guarded", 0),
    ],
    ids=["by hand", "never steps", "no gradients", "its own guard"],
)
def test_a_run_without_a_guard_says_so_early(tmp_path, script, words, step):
    """One line as soon as it is certain, long before the summary."""
    (tmp_path / "script.py").write_text("import sys, torch\n" + script)
    done = forked.python("-m", "nanproof", "run", "script.py", cwd=tmp_path)
    lines = done.stderr.splitlines()
    early = lines[: lines.index(f"step {step}")]
    assert sum(words in line for line in early) == 1, done.stderr
    assert sum("so far" in line for line in lines) <= 1


def test_an_ordinary_run_is_not_said_to_be_unguarded(tmp_path):
    """A backward and a step before the training, weights that are loaded, inputs with gradients, accumulation: all are usual."""
    (tmp_path / "script.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(3, 1)\n"
        "x = torch.randn(4, 3, requires_grad=True)\n"
        "for _ in range(4):\n"
        "    model(x).square().mean().backward()\n"
        "    x.data += x.grad.sign()\n"
        "model.load_state_dict(torch.nn.Linear(3, 1).state_dict())\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "optimizer.zero_grad()\n"
        "optimizer.step()\n"
        "for step in range(12):\n"
        "    model(torch.randn(4, 3)).square().mean().backward()\n"
        "    if step % 4 == 3:\n"
        "        optimizer.step()\n"
        "        optimizer.zero_grad()\n"
    )
    done = forked.python("-m", "nanproof", "run", "--json", "script.py", cwd=tmp_path)
    (summary,) = done.stderr.splitlines()
    assert [(one["guarded"], one["steps"]) for one in json.loads(summary)["guarded"]] == [(True, 3)]


def test_a_weight_that_cannot_be_compared_does_not_stop_the_script(capsys):
    """The look at it is given up."""
    runs = ScriptRuns(Session(Options(policy=Policy())))
    weight = torch.eye(3).to_sparse().requires_grad_()
    for _ in range(4):
        runs.at_backward(torch.sparse.mm(weight, torch.ones(3, 1)).sum())
    assert capsys.readouterr().err == ""


def test_a_trainer_without_an_adapter_is_named_when_it_begins(capsys):
    """With the reason, before its first step."""
    session = Session(Options(policy=Policy()))
    assert not _protect(session, object()) and not session.trainers
    assert "object is not guarded as a trainer" in capsys.readouterr().err


AFTERWARDS = """
import torch
from torch.nn.modules import module
from nanproof import Policy
from nanproof.integrations.script._autorun import autorun
from nanproof.integrations.script._session import Options

autorun("script.py", [], module=False, options=Options(policy=Policy()))
print(len(module._global_forward_pre_hooks), len(module._global_forward_hooks))
"""


@pytest.mark.parametrize("end", ["", "raise RuntimeError"], ids=["no backward", "raises"])
def test_no_hook_of_torch_outlives_the_run(tmp_path, end):
    """The script made an optimizer and never called backward."""
    (tmp_path / "script.py").write_text(
        "import torch\n"
        "model = torch.nn.Linear(2, 2)\n"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        f"{end}\nmodel(torch.ones(1, 2))\n"
    )
    (tmp_path / "afterwards.py").write_text(AFTERWARDS)
    assert forked.python("afterwards.py", cwd=tmp_path).stdout.split() == ["0", "0"]


CAUGHT = """
import torch
from nanproof import TrainingHalted

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
halted = False
for step in range(40):
    x = torch.randn(4, 4)
    if step >= 5 and not halted:
        x[0] = float("nan")
    try:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    except TrainingHalted:
        halted = True
        {then}
"""


@pytest.mark.parametrize("optimizer", ["own", "fused"])
@pytest.mark.parametrize("then", ["pass", "break"])
def test_a_run_that_went_on_after_a_halt_is_not_called_halted(tmp_path, then, optimizer):
    """The script caught the exception. With `fused`, the halt comes later than its step."""
    (tmp_path / "script.py").write_text(CAUGHT.format(then=then))
    (tmp_path / "run.py").write_text(
        "from nanproof import Policy\n"
        "from nanproof.integrations.script._autorun import autorun\n"
        "from nanproof.integrations.script._session import Options\n"
        f"options = Options(policy=Policy(lag=2, diagnose='never'), optimizer={optimizer!r}, quiet=True)\n"
        "_, summary = autorun('script.py', [], module=False, options=options)\n"
        "(one,) = summary.guarded\n"
        "print(any(i.action == 'halted' for i in one.incidents), one.halted is not None, summary.halted is not None)\n"
        "print(', halted at step ' in one.lines()[0])\n"
    )
    done = forked.python("run.py", cwd=tmp_path)
    halted = str(then == "break")
    assert done.stdout.split() == ["True", *[halted] * 3], done.stderr


SAVED = """
import io, pickle, threading, time, torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(8, 1)

    def forward(self, x):
        return self.a(x).square().mean()

class Slow(io.BytesIO):
    def write(self, data):
        writing.set()
        go_on.wait(20)
        return super().write(data)

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
writing, go_on = threading.Event(), threading.Event()
calls = []
for step in range(8):
    x = torch.randn(4, 8)
    if step == 5:
        x[2] = float("nan")
        own = len(model._forward_pre_hooks), len(model._forward_hooks)
        file = Slow()
        saver = threading.Thread(target=torch.save, args=(model, file))
        saver.start()
        writing.wait(20)
        assert (len(model._forward_pre_hooks), len(model._forward_hooks)) == own
        model.register_forward_hook(lambda *args: calls.append(step))
    optimizer.zero_grad()
    eval("model(x)").backward()
    optimizer.step()
go_on.set()
saver.join()
calls.clear()
model(x)
legacy, nested = io.BytesIO(), io.BytesIO()
assert calls == [7]
model._forward_hooks.popitem()
torch.save(model, legacy, _use_new_zipfile_serialization=False)
torch.save({"model": model}, f=nested, pickle_module=pickle, pickle_protocol=4)
for saved in file, legacy, nested:
    assert b"nanproof" not in saved.getvalue()
    saved.seek(0)
    twin = torch.load(saved, weights_only=False)
    assert torch.equal((twin["model"] if saved is nested else twin)(x.nan_to_num()), model(x.nan_to_num()))
"""


def test_a_model_is_saved_without_hooks_while_it_trains(tmp_path):
    """By another thread, too: the model keeps its hooks, those that the script adds meanwhile included, and the bad step is
    explained. The files do not need nanproof."""
    (tmp_path / "script.py").write_text(SAVED)
    _, (one,) = protected("script.py", cwd=tmp_path)
    (incident,) = one["incidents"]
    assert incident["step"] == 5 and incident["diagnosis"]["cause"] == "nonfinite-batch" and incident["diagnosis"]["verified"]
