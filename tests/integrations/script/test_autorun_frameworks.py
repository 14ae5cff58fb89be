"""`nanproof run` on scripts of Lightning and DeepSpeed that know nothing of it: their own adapters are used. And on a script
whose callbacks would attach a guard themselves."""

from __future__ import annotations

import json
import os

import pytest

import forked

MODEL = """
import math, os, sys, torch
from torch import nn

torch.manual_seed(0)
x = torch.randn(32, 6)
y = x.sum(dim=1, keepdim=True)
x[21] = math.nan
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=4)
net = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))
"""

LIGHTNING = """
import lightning.pytorch as pl

class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net

    def training_step(self, batch, index):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 1e-2)

trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Module(), data)
"""

DEEPSPEED = """
import deepspeed

class Module(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net

    def forward(self, x, y):
        return (self.net(x) - y).square().mean()

model = Module()
config = {"train_micro_batch_size_per_gpu": 4, "zero_allow_untested_optimizer": True, "zero_optimization": {"stage": 1}}
engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), 1e-2), config=config)
for batch in data:
    engine.backward(engine(*batch))
    engine.step()
"""


@pytest.mark.parametrize(
    ("package", "script", "name"),
    [
        ("lightning", LIGHTNING, "Trainer"),
        pytest.param("deepspeed", DEEPSPEED, "DeepSpeedEngine", marks=pytest.mark.slow),
    ],
)
def test_the_adapter_is_used(tmp_path, package, script, name):
    """One guard, the adapter's; the step of the bad sample is refused and explained, and the weights stay finite."""
    pytest.importorskip(package)
    check = "\nassert all(bool(torch.isfinite(p).all()) for p in net.parameters())\n"
    (tmp_path / "script.py").write_text(MODEL + script + check)
    one_rank = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29781"}
    environment = {**os.environ, **(one_rank if package == "deepspeed" else {})}
    run = ["-m", "nanproof", "run", "--json", "--run-dir", "records", "script.py"]
    done = forked.python(*run, cwd=tmp_path, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    (one,) = json.loads(done.stderr.strip().splitlines()[-1])["guarded"]
    assert (one["name"], one["guarded"], one["steps"], one["refused"]) == (name, True, 8, 1)
    (incident,) = one["incidents"]
    assert incident["step"] == 5 and incident["diagnosis"]["cause"] == "nonfinite-batch"
    assert (tmp_path / "records" / "incidents.jsonl").exists()


CALLBACK = """
{imports}

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net

    def forward(self, x, labels=None):
        return {{"loss": (self.net(x) - labels).square().mean()}}

rows = [{{"x": row, "labels": label}} for row, label in zip(x, y)]
args = TrainingArguments("out", per_device_train_batch_size=4, max_steps=4, report_to="none", use_cpu=True, save_strategy="no",
                         disable_tqdm=True)
monitor = GradientMonitorCallback(observe_only={only})
trainer = Trainer(Model(), args, train_dataset=rows, callbacks=[monitor])
trainer.train()
guard = monitor.guard
print(guard.run_dir, guard.policy.switch_to_fused, guard.observe is not None, guard is trainer.nanproof)
"""
IMPORTS = (
    "from transformers import Trainer, TrainingArguments",
    "from nanproof.integrations.transformers import GradientMonitorCallback",
)


@pytest.mark.parametrize("only", [False, True], ids=["guards", "observes"])
@pytest.mark.parametrize("imports", [IMPORTS, IMPORTS[::-1]], ids=["trainer first", "callback first"])
def test_a_callback_leaves_the_options_of_the_command_in_force(tmp_path, imports, only):
    """The guard is the one of `nanproof run`, with its folder, policy and observation. The callback reads its records."""
    pytest.importorskip("transformers")
    (tmp_path / "script.py").write_text(MODEL + CALLBACK.format(imports="\n".join(imports), only=only))
    run = ["-m", "nanproof", "run", "--json", "--observe", "--run-dir", "records", "script.py"]
    done = forked.python(*run, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "records False True True"
    assert (tmp_path / "records" / "steps.jsonl").exists() and not (tmp_path / "out" / "nanproof").exists()
    (one,) = json.loads(done.stderr.strip().splitlines()[-1])["guarded"]
    assert (one["name"], one["steps"], one["run_dir"]) == ("Trainer", 4, "records")
