"""Terms of a loss in loops that somebody else runs: every framework's backward leads back to them, with accumulation, and the
incident names the bad one."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import forked
from integrations.lightning_toys import LIGHTNINGS_OWN_WARNINGS, trainer_of
from nanproof import read_incidents, read_steps
from nanproof.integrations.lightning._fabric import protect_fabric
from nanproof.integrations.lightning._trainer import protect_trainer as protect_lightning
from nanproof.numerics.losses import weighted_sum

ROWS, BATCH, PARTS, BAD = 32, 4, 2, 2
NAMES = ["text_loss", "latent_loss"]
SCRIPT = """
import sys, torch
from torch import nn
sys.path[:0] = {path!r}
from test_loss_terms import BATCH, PARTS, Net, rows
torch.manual_seed(0)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
x, level = rows()
for i in range(0, len(x), BATCH):
    (model(x[i : i + BATCH], level[i : i + BATCH]) / PARTS).backward()
    if (i // BATCH) % PARTS == PARTS - 1:
        optimizer.step()
        optimizer.zero_grad()
"""


class Net(nn.Module):
    """The log of a level of 0 is what is bad."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x, level):
        out = self.head(self.body(x).tanh()).squeeze(-1)
        # The level takes part in the gradient: a loop that is only watched refuses by what it sees there.
        latent = (out.square() * level).sum() / level.sum() - (level + out * 0).log().mean()
        return weighted_sum({"text_loss": out.square().mean(), "latent_loss": latent}, {"latent_loss": 0.5})


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    """The second micro-batch of step 2 has a level of 0."""
    x = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))
    level = torch.ones(ROWS)
    level[(BAD * PARTS + 1) * BATCH + 1] = 0.0
    return x, level


def check(history, incidents) -> None:
    """The records of the four steps, and the incident of the third."""
    assert [[name for name, _ in record.terms] for record in history] == [NAMES] * 4
    for record in history:
        text, latent = (value for _, value in record.terms)
        assert record.loss == pytest.approx(text + 0.5 * latent, rel=1e-5)
    [incident] = incidents
    assert (incident.step, incident.kind, incident.micro_batch) == (BAD, "nonfinite-loss", 1)
    assert dict(incident.terms)["latent_loss"] == math.inf and math.isfinite(dict(incident.terms)["text_loss"])
    assert "; of the terms latent_loss is inf, text_loss is " in incident.message


@pytest.fixture
def _own_state() -> Iterator[None]:
    """Accelerate keeps its settings in the process."""
    from accelerate.state import AcceleratorState, GradientState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.mark.usefixtures("_own_state")
def test_transformers(tmp_path):
    import nanproof
    from integrations.tiny import make_trainer

    class Named(Net):
        def forward(self, x, level):
            return {"loss": super().forward(x, level)}

    torch.manual_seed(0)
    data = [{"x": x, "level": level} for x, level in zip(*rows(), strict=True)]
    trainer = make_trainer(tmp_path, Named(), data, gradient_accumulation_steps=PARTS, max_grad_norm=1.0)
    guard = nanproof.protect(trainer)
    trainer.train()
    check(guard.history, guard.incidents)


@pytest.mark.usefixtures("_own_state")
def test_accelerate():
    from accelerate import Accelerator

    from nanproof.integrations.accelerate._accelerator import protect_accelerator

    torch.manual_seed(0)
    accelerator, model = Accelerator(cpu=True, gradient_accumulation_steps=PARTS), Net()
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    guard = protect_accelerator(accelerator)
    x, level = rows()
    for i in range(0, ROWS, BATCH):
        with accelerator.accumulate(model):
            accelerator.backward(model(x[i : i + BATCH], level[i : i + BATCH]))
            optimizer.step()
            optimizer.zero_grad()
    guard.close()
    check(guard.history, guard.incidents)


def test_fabric():
    from lightning.fabric import Fabric

    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1)
    guard = protect_fabric(fabric)
    model = Net()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    x, level = rows()
    for i in range(0, ROWS, BATCH):
        fabric.backward(model(x[i : i + BATCH], level[i : i + BATCH]) / PARTS)
        if (i // BATCH) % PARTS == PARTS - 1:
            optimizer.step()
            optimizer.zero_grad()
    guard.close()
    check(guard.history, guard.incidents)


@LIGHTNINGS_OWN_WARNINGS
def test_lightning():
    import lightning.pytorch as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch, batch_idx):
            return self.net(*batch)

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    torch.manual_seed(0)
    trainer = trainer_of("lightning.pytorch", accumulate_grad_batches=PARTS)
    guard = protect_lightning(trainer)
    trainer.fit(Module(), DataLoader(TensorDataset(*rows()), batch_size=BATCH))
    check(guard.history, guard.incidents)


def test_a_script_that_knows_nothing_of_the_guard(tmp_path):
    """`nanproof run`: its journal has the terms."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(path=[str(Path(__file__).parent), *sys.path]))
    done = forked.python("-m", "nanproof", "run", "--json", "--run-dir", tmp_path / "run", script, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = next(path.parent for path in (tmp_path / "run").rglob("steps.jsonl"))
    check(list(read_steps(folder)), list(read_incidents(folder)))


def engine(rank: int):
    """With DeepSpeed, called by test_deepspeed, which has two ranks. Rank 1 alone has the bad level."""
    os.environ.update(DS_ACCELERATOR="cpu", RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_SIZE="2")
    import deepspeed
    import deepspeed.ops

    from nanproof.integrations.deepspeed._engine import protect_engine

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(0)
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": PARTS,
        "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 1 << 30,
    }
    made, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2), config=config)
    guard = protect_engine(made)
    x, level = rows()
    level = level if rank == 1 else torch.ones_like(level)
    for i in range(0, ROWS, BATCH):
        made.backward(made(x[i : i + BATCH], level[i : i + BATCH]))
        made.step()
    guard.close()
    found = [[i.step, i.kind, i.rank, i.micro_batch, i.message, [[n, str(v)] for n, v in i.terms]] for i in guard.incidents]
    return found, [[name for name, _ in record.terms] for record in guard.history]
