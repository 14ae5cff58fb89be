"""A raw Accelerate loop on CUDA, where verdicts come two steps late: the run is one that never saw the bad batch, the schedule
is put right afterwards, and fp16's scaler is the guard's business."""

from __future__ import annotations

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate.accelerator", reason="accelerate is not installed")

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

import nanproof
from toys import syncs_raise

pytestmark = pytest.mark.gpu

STEPS, BAD, SAMPLE = 12, 6, 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.1), nn.GELU(), nn.Linear(32, 1))

    def forward(self, x, labels):
        return {"loss": nn.functional.mse_loss(self.layers(x).squeeze(-1).float(), labels)}


def train(steps, precision, bad=None):
    """The documented loop, over these of the steps' batches."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)
    accelerator = Accelerator(mixed_precision=precision)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    guard = nanproof.protect(accelerator)
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(16, 8, generator=generator), torch.randn(16, generator=generator)) for _ in range(STEPS)]
    for i in steps:
        x, y = (t.clone() for t in data[i])
        if i == bad:
            x[SAMPLE, 2] = torch.nan
        accelerator.backward(model(x.to(accelerator.device), labels=y.to(accelerator.device))["loss"])
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    guard.close()
    return [p.detach().cpu() for p in model.parameters()], scheduler.scheduler.last_epoch, guard


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
def test_a_bad_batch_leaves_no_trace(precision):
    weights, epoch, guard = train(range(STEPS), precision, BAD)
    expected, _, other = train([i for i in range(STEPS) if i != BAD], precision)
    assert guard.path.startswith("device")
    assert [(i.step, i.kind) for i in guard.incidents] == [(BAD, "nonfinite-loss")]
    assert guard.incidents[0].diagnosis.samples == (SAMPLE,)
    assert other.incidents == []
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
    assert epoch == STEPS - 1 if precision != "fp16" else epoch < STEPS


def test_healthy_steps_do_not_wait_for_the_device():
    """Beyond what the loop reads itself, which is nothing."""
    torch.cuda.synchronize()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(made := Net(), torch.optim.AdamW(made.parameters(), lr=1e-2))
    guard = nanproof.protect(accelerator)
    x, y = torch.randn(16, 8, device="cuda"), torch.randn(16, device="cuda")

    def step():
        accelerator.backward(model(x, labels=y)["loss"])
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    with syncs_raise():
        for _ in range(5):
            step()
    guard.close()
    assert guard.incidents == [] and len(guard.history) == 10
