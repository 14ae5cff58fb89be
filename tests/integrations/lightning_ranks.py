"""What each rank of test_lightning does: two ranks (gloo) fit with DDP, with and without a bad batch on rank 1."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path

import lightning.pytorch as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nanproof.integrations.lightning import protect_trainer

BATCH, STEPS, BAD = 8, 12, 5


class Toy(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch[0]).squeeze(-1), batch[1])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def run(rank: int, bad: bool) -> dict:
    x = torch.randn(STEPS * BATCH, 6, generator=torch.Generator().manual_seed(rank))
    y = x.sum(1)
    if bad and rank == 1:
        x[BAD * BATCH + 3, 2] = float("inf")
    keep = [i for i in range(len(x)) if bad or i // BATCH != BAD]
    torch.manual_seed(0)
    module = Toy()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", use_distributed_sampler=False, gradient_clip_val=1.0, **quiet
    )
    guard = protect_trainer(trainer)
    torch.manual_seed(rank)
    trainer.fit(module, DataLoader(TensorDataset(x[keep], y[keep]), batch_size=BATCH))
    return {"incidents": [[i.step, i.rank] for i in guard.incidents], "weights": module.state_dict()}


def main(rank: int, folder: str, port: int) -> None:
    """One rank, from beginning to end, in a process of its own."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for kind in ("bad", "clean"):
        torch.save(run(rank, kind == "bad"), Path(folder) / f"{kind}{rank}.pt")
    torch.distributed.barrier()
    os._exit(0)
