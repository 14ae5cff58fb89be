"""The terms of a loss on a CUDA device: they travel with the verdict, nothing waits, and they are the host's numbers.
`pytest -m gpu`."""

from __future__ import annotations

import math
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import nanproof
from nanproof.core.judge._terms import terms_of
from nanproof.numerics.losses import masked_mse, weighted_sum

pytestmark = pytest.mark.gpu


@contextmanager
def no_waits():
    """Every wait of the host raises."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def loss_fn(model, batch):
    x, y, mask = batch
    out = model(x)
    latent = masked_mse(out, y, mask, empty="refuse")
    return weighted_sum({"text_loss": out.square().mean(), "latent_loss": latent}, {"latent_loss": 0.5})


def batches(count: int, bad: int | None = None):
    g = torch.Generator().manual_seed(1)
    made = [
        [torch.randn(8, 6, generator=g), torch.randn(8, 2, generator=g), torch.rand(8, generator=g) < 0.7] for _ in range(count)
    ]
    if bad is not None:
        made[bad][1][made[bad][2].nonzero()[0], 0] = math.inf
    return [[t.cuda() for t in batch] for batch in made]


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_healthy_step_waits_for_nothing_and_its_record_has_the_terms(scaled, parts):
    """With the Triton verdict, and with a GradScaler, which takes the one in torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=16.0) if scaled else None
    data, wanted = batches(10 * parts), []
    with nanproof.Guard(model, optimizer, loss_fn=loss_fn, scaler=scaler) as guard:
        for i in range(10):
            micro = data[i * parts : (i + 1) * parts]
            with torch.no_grad():
                each = [(model(x).square().mean(), masked_mse(model(x), y, mask, empty="refuse")) for x, y, mask in micro]
            wanted.append(torch.stack([torch.stack(pair) for pair in each]).mean(0))
            if i < 5:  # kernels are compiled, pinned memory is taken
                guard.train_step(*micro)
                continue
            with no_waits():
                guard.train_step(*micro)
    assert [[name for name, _ in r.terms] for r in guard.history] == [["text_loss", "latent_loss"]] * 10
    found = torch.tensor([[value for _, value in r.terms] for r in guard.history])
    torch.testing.assert_close(found, torch.stack(wanted).cpu(), rtol=1e-5, atol=1e-6)
    assert all(len(r.by_parameter) == 4 for r in guard.history)


def test_the_incident_names_the_term_although_the_verdict_comes_late():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 2)).cuda()
    with nanproof.Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), loss_fn=loss_fn) as guard:
        for batch in batches(8, bad=4):
            guard.train_step(batch)
    [incident] = guard.incidents
    assert (incident.step, incident.kind) == (4, "nonfinite-loss")
    assert dict(incident.terms)["latent_loss"] == math.inf and math.isfinite(dict(incident.terms)["text_loss"])
    assert "; of the terms latent_loss is inf, text_loss is " in incident.message


def test_a_term_on_the_host_is_moved():
    there = torch.tensor(2.0, device="cuda", requires_grad=True)
    loss = weighted_sum({"host": torch.tensor(3.0), "device": there * 1})
    loss.backward()
    assert loss.device == there.device and loss.item() == 5.0 and there.grad.item() == 1.0
    assert terms_of(loss).vector.tolist() == [3.0, 2.0]
