"""What each rank of test_lightning does: fit with DDP on gloo, with and without a bad batch on rank 1."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nanproof
from nanproof.integrations.lightning._fabric import protect_fabric
from nanproof.integrations.lightning._trainer import protect_trainer

BATCH, STEPS, BAD = 8, 12, 5


class Toy(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]).squeeze(-1), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class WithLoss(nn.Module):
    """A model that returns its own loss: its steps can be run again in a loop of Fabric's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Toy().net

    def forward(self, x, y):
        return {"loss": F.mse_loss(self.net(x).squeeze(-1), y)}


def data(rank: int, bad: bool, gone: tuple[int, ...]) -> DataLoader:
    x = torch.randn(STEPS * BATCH, 6, generator=torch.Generator().manual_seed(rank))
    y = x.sum(1)
    if bad and rank == 1:
        x[BAD * BATCH + 3, 2] = float("inf")
    keep = [i for i in range(len(x)) if bad or i // BATCH not in gone]
    return DataLoader(TensorDataset(x[keep], y[keep]), batch_size=BATCH)


def trainer(rank: int, bad: bool, accumulate: int, lag: int) -> dict:
    torch.manual_seed(0)
    module = Toy()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    ranks = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "use_distributed_sampler": False}
    trainer = L.Trainer(max_epochs=1, accumulate_grad_batches=accumulate, gradient_clip_val=1.0, **ranks, **quiet)
    guard = protect_trainer(trainer, policy=nanproof.Policy(lag=lag))
    torch.manual_seed(rank)
    trainer.fit(module, data(rank, bad, (BAD,) if accumulate == 1 else (4, 5)))
    return {
        "incidents": [[i.step, i.rank, i.diagnosis.cause, *i.diagnosis.samples] for i in guard.incidents],
        "weights": module.state_dict(),
    }


def fabric(rank: int, bad: bool, accumulate: int, lag: int) -> dict:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    torch.manual_seed(0)
    model = WithLoss()
    guard = protect_fabric(fabric, policy=nanproof.Policy(lag=lag))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    torch.manual_seed(rank)
    for i, (x, y) in enumerate(data(rank, bad, (BAD,) if accumulate == 1 else (4, 5))):
        last = (i + 1) % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not last):
            fabric.backward(model(x, y)["loss"] / accumulate)
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    guard.close()
    return {
        "incidents": [[i.step, i.rank, i.diagnosis.cause, *i.diagnosis.samples] for i in guard.incidents],
        "weights": model.state_dict(),
    }


def main(rank: int, folder: str, port: int, job: str, accumulate: int, lag: int) -> None:
    """One rank, from beginning to end, in a process of its own."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for kind in ("bad", "clean"):
        done = {"trainer": trainer, "fabric": fabric}[job](rank, kind == "bad", accumulate, lag)
        torch.save(done, Path(folder) / f"{kind}{rank}.pt")
    torch.distributed.barrier()
    os._exit(0)
