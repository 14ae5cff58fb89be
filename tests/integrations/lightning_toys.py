"""A toy for Lightning's Trainer, its data with one bad sample, and a fit: what the tests of the integration share."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

from nanproof.integrations.lightning._trainer import protect_trainer
from toys import net

LIGHTNINGS_OWN_WARNINGS = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    "ignore:.*number of training batches.*is smaller than the logging interval.*",
    "ignore:.*returned `None`.*",
    "ignore:.*use of fork.*:DeprecationWarning",
    "ignore:.*callbacks used to create the checkpoint.*",
)
PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
BATCH, STEPS = 8, 12
BAD = 5
"""The bad batch, and which of its samples is."""
SAMPLE = 3


def samples(bad: bool, without: tuple[int, ...] = ()) -> TensorDataset:
    """Twelve batches; `bad`: one NaN in one sample of one; `without`: batches that were never there."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(STEPS * BATCH, 6, generator=g)
    y = x.sum(1)
    if bad:
        x[BAD * BATCH + SAMPLE, 2] = float("nan")
    keep = [i for i in range(len(x)) if i // BATCH not in without]
    return TensorDataset(x[keep], y[keep])


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def toy(package: str, *, optimizer: str = "adamw", every: int = 1, interval: str = "step", dropout: float = 0.2, none_at=()):
    """A module that counts what it is made to do."""
    L = importlib.import_module(package)

    class Toy(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(dropout)
            self.outputs: list[torch.Tensor] = []
            self.rates: list[float] = []
            self.seen: dict[str, torch.Tensor] = {}

        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.net(batch[0]).squeeze(-1), batch[1])
            self.outputs.append(loss.detach())
            self.seen["x"] = batch[0]
            self.log("loss", loss)
            return None if batch_idx in none_at else loss

        def on_train_batch_start(self, batch, batch_idx):
            self.rates.append(self.optimizers().param_groups[0]["lr"])

        def configure_optimizers(self):
            optimizer_ = OPTIMIZERS[optimizer](self.parameters())
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer_, 0.9)
            return [optimizer_], [{"scheduler": schedule, "interval": interval, "frequency": every}]

    torch.manual_seed(0)
    return Toy()


def trainer_of(package: str, **settings):
    L = importlib.import_module(package)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    return L.Trainer(**{"max_epochs": 1, "accelerator": "cpu", "devices": 1, **quiet, **settings})


def fit(module, data, *, package="lightning.pytorch", protect=True, policy=None, **settings):
    """Returns trainer and guard after a fit; random numbers of the fit always start alike."""
    trainer = trainer_of(package, **settings)
    guard = protect_trainer(trainer, policy=policy) if protect else None
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(data, batch_size=BATCH))
    return trainer, guard


def weights(module) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in module.state_dict().items()}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def moments(trainer) -> list[torch.Tensor]:
    return [v for state in trainer.optimizers[0].state.values() for v in state.values() if isinstance(v, torch.Tensor)]
