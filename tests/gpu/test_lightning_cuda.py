"""Lightning on CUDA, where verdicts come two steps late: a bad batch leaves no trace, in any precision, and healthy steps do not
wait for the device."""

from __future__ import annotations

import importlib.util

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from nanproof.integrations.lightning._trainer import protect_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings(
        "ignore:.*does not have many workers.*",
        "ignore:.*LeafSpec.*",
        "ignore:.*Precision 16-mixed is not supported by the model summary.*",
        "ignore:.*TF32.*",
        "ignore:.*ynchronization debug mode.*",
        "ignore:.*multi-threaded, use of fork.*",
    ),
]
BATCH, STEPS, BAD, SAMPLE = 8, 16, 5, 3
NAME = "lightning.pytorch" if importlib.util.find_spec("lightning") else "pytorch_lightning"


def samples(bad: bool, without: tuple[int, ...] = ()) -> TensorDataset:
    x = torch.randn(STEPS * BATCH, 6, generator=torch.Generator().manual_seed(3))
    y = x.sum(1)
    if bad:
        x[BAD * BATCH + SAMPLE, 2] = float("nan")
    keep = [i for i in range(len(x)) if i // BATCH not in without]
    return TensorDataset(x[keep], y[keep])


def fit(data, *, protect=True, every=1, strict_from=None, **settings):
    L = importlib.import_module(NAME)

    class Toy(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.ReLU(), nn.Linear(16, 1))

        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.net(batch[0]).squeeze(-1).float(), batch[1])
            self.log("loss", loss)
            return loss

        def on_train_batch_start(self, batch, batch_idx):
            if strict_from is not None and batch_idx >= strict_from:
                torch.cuda.set_sync_debug_mode("error")

        def on_train_batch_end(self, *args):
            torch.cuda.set_sync_debug_mode("default")

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
            return [optimizer], [{"scheduler": schedule, "interval": "step", "frequency": every}]

    torch.manual_seed(0)
    module = Toy()
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    trainer = L.Trainer(**{"max_epochs": 2, "accelerator": "cuda", "devices": 1, **quiet, **settings})
    guard = protect_trainer(trainer) if protect else None
    torch.manual_seed(1)
    try:
        trainer.fit(module, DataLoader(data, batch_size=BATCH))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return {k: v.cpu() for k, v in module.state_dict().items()}, guard, float(rate)


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", ["32-true", "16-mixed", "bf16-mixed"])
def test_the_run_that_never_saw_the_bad_batch(precision, accumulate, every):
    """Bit for bit, schedule included: steps behind the bad one are held and run again."""
    settings = {"precision": precision, "accumulate_grad_batches": accumulate, "gradient_clip_val": 1.0, "every": every}
    weights, guard, rate = fit(samples(bad=True), **settings)
    clean, healthy, other = fit(samples(bad=False, without=(BAD,) if accumulate == 1 else (4, 5)), **settings)
    steps = STEPS // accumulate
    bad = [i for i in guard.incidents if i.diagnosis is not None]
    assert [(i.step, i.diagnosis.cause) for i in bad][:1] == [(BAD // accumulate, "nonfinite-batch")]
    assert guard.refused_so_far - healthy.refused_so_far == 2 and guard.next_step == 2 * steps
    assert guard.path.startswith("device")
    assert same(weights, clean)
    assert rate == other


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_healthy_run_is_lightnings_own_and_never_waits(precision):
    """Weights to 1e-6; from the fifth batch on, nothing between the forward and the end of the batch waits for the device. (fp16
    is another matter: while its scale finds its size steps are refused, and Lightning's own schedule does not wait for them.)"""
    weights, guard, rate = fit(samples(bad=False), precision=precision, max_epochs=1, strict_from=4)
    plain, _, other = fit(samples(bad=False), precision=precision, max_epochs=1, protect=False)
    assert not guard.incidents and rate == other
    tolerance = 1e-6 if precision == "32-true" else 1e-4
    assert all(torch.allclose(weights[k].float(), plain[k].float(), atol=tolerance, rtol=0) for k in plain)
