"""`nanproof check module:build`, as a user runs it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

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

def iterator():
    return {**build(), "batches": iter(build()["batches"])}

def accumulated():
    return {**build(), "accumulate": 5}

def summed():
    return {**accumulated(), "loss_fn": lambda m, x: m(x).square().sum()}
"""

TRAINER = """
import torch
from tiny import llama, token_rows
from transformers import Trainer, TrainingArguments

class Loss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs).loss

def trainer(kind=Trainer, rows=8):
    model = llama()
    args = TrainingArguments("out", per_device_train_batch_size=4, gradient_accumulation_steps=2, report_to=[], use_cpu=True)
    return {"trainer": kind(model=model, args=args, train_dataset=token_rows(rows))}

def alone():
    return trainer()["trainer"]

def own_loss():
    return trainer(Loss)

def leaks():
    made = trainer()
    made["trainer"].model.model.norm.register_forward_pre_hook(lambda m, args: args[0] + args[0].mean(1, keepdim=True))
    return made

def no_data():
    model = llama()
    return {"trainer": Trainer(model=model, args=TrainingArguments("out", report_to=[], use_cpu=True))}
"""

LIGHTNING = """
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import lightning.pytorch as L

data = DataLoader(TensorDataset(torch.randn(32, 5, 6), torch.randint(0, 3, (32,))), batch_size=8)

class Module(L.LightningModule):
    def __init__(self, first=True, divided=1):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head, self.divided = nn.LSTM(6, 8, batch_first=first), nn.Linear(8, 3), divided

    def forward(self, x):
        return self.head(self.lstm(x)[0].mean(1))

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self(batch[0]), batch[1]) / self.divided
        self.log("loss", loss)
        return {"loss": loss}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer)}

class WithData(Module):
    def train_dataloader(self):
        return data

def alone():
    return WithData()

def module():
    return {"model": Module(), "batches": data}

def wrong():
    return {"model": Module(first=False), "batches": data}

def accumulated():
    trainer = L.Trainer(accumulate_grad_batches=4, logger=False, enable_checkpointing=False, accelerator="cpu")
    return {"model": Module(), "batches": data, "trainer": trainer}

def divided_twice():
    return {**accumulated(), "model": Module(divided=4)}

def no_data():
    return {"model": Module()}
"""


@pytest.fixture
def check(tmp_path, monkeypatch):
    """The command in this process, in the folder of the user's module."""
    for name, code in (("mine", CODE), ("trained", TRAINER), ("lit", LIGHTNING)):
        (tmp_path / f"{name}.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield lambda *args: CliRunner().invoke(app, ["check", *args])
    for name in ("mine", "trained", "lit"):
        sys.modules.pop(name, None)


@pytest.fixture
def tiny(monkeypatch):
    """The toys of the integrations can be imported."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "integrations")


def causes(done):
    assert done.exit_code in (0, 1), done.output
    return [found["cause"] for found in json.loads(done.stdout)["found"]]


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


def test_probes_say_what_they_did(check):
    """A line each; in JSON a record each."""
    done = check("mine:build")
    assert "- train-eval-differ: ran the batch in training and in evaluation" in done.stdout
    probes = json.loads(check("mine:build", "--json").stdout)["probes"]
    assert {"name", "did", "saw", "found"} == set(probes[0]) and all(p["found"] is None for p in probes)


def test_batches_and_accumulation(check):
    assert causes(check("mine:iterator", "--json")) == []
    assert causes(check("mine:accumulated", "--json")) == []
    assert causes(check("mine:summed", "--json")) == ["accumulation-not-averaged"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("entry", "found"),
    [("alone", []), ("trainer", []), ("own_loss", ["accumulation-not-averaged"]), ("leaks", ["causal-leak"])],
)
def test_a_trainer(check, tiny, entry, found):
    """Its own loss over the first batch of its data; a loss that ignores how many tokens a step has is not averaged."""
    assert causes(check(f"trained:{entry}", "--json")) == found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("entry", "found"),
    [
        ("alone", []),
        ("module", []),
        ("wrong", ["samples-mixed"]),
        ("accumulated", []),
        ("divided_twice", ["accumulation-not-averaged"]),
    ],
)
def test_a_lightning_module(check, entry, found):
    """Its training_step, without a fit."""
    assert causes(check(f"lit:{entry}", "--json")) == found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("entry", ["trained:no_data", "lit:no_data"])
def test_trainers_without_data(check, tiny, entry):
    done = check(entry)
    assert done.exit_code == 2 and "hint: " in done.stderr and done.stdout == ""
