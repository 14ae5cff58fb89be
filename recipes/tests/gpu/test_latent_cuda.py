"""latent-dlm on CUDA: its own part of a step makes the host wait for nothing, and the damaged sample is refused and named."""

from __future__ import annotations

import pytest
import torch

import nanproof
from latent_toys import prepared, small
from nanproof.numerics.precision import choose
from nanproof_recipes.latent_dlm.arms import FIXED, GUARDED
from nanproof_recipes.latent_dlm.model.diffusion import Noiser
from nanproof_recipes.latent_dlm.model.model import MMDiT
from nanproof_recipes.latent_dlm.model.sampling import draw
from nanproof_recipes.latent_dlm.train.training import Losses, train

pytest.importorskip("diffusers")
CUDA = torch.device("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("prediction", ["epsilon", "v", "x0"])
@pytest.mark.parametrize("arm", [FIXED, GUARDED], ids=["fixed", "guarded"])
def test_a_healthy_step_does_not_wait(arm, prediction):
    config = small(loss__prediction=prediction, training__dtype="bf16")
    data = prepared(config)
    torch.manual_seed(0)
    with CUDA:
        model = MMDiT(config.model).to(torch.bfloat16 if arm.weights == "bf16" else torch.float32)
    precision = choose(model, CUDA, "bf16") if arm.weights == "fp32" else None
    losses = Losses(arm, config, Noiser(config, padded=False), precision, CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = {"ids": data.train.ids[:4].to(CUDA), "latent": data.train.latents[:4].to(CUDA)}
    with nanproof.Guard(model, optimizer, loss_fn=losses) as guard:
        for _ in range(25):  # kernels are compiled, the scheduler's tables come to the device
            guard.train_step(batch)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(15):
                guard.train_step(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert not guard.incidents and len(guard.history) == 40
    assert all(dict(record.terms).keys() == {"text_loss", "latent_loss"} for record in guard.history)


@pytest.mark.gpu
@pytest.mark.parametrize("arm", [FIXED, GUARDED], ids=["fixed", "guarded"])
def test_the_damaged_sample_is_refused_and_named(arm, tmp_path):
    every = {"modes__unconditional": 1.0, "modes__text_to_latent": 0.0, "modes__latent_to_text": 0.0}
    config = small(training__steps=30, training__dtype="bf16", **every)
    found = train(config, arm, prepared(config), tmp_path)
    (incident,) = found.incidents
    assert (incident.step, incident.kind, incident.action) == (12, "nonfinite-loss", "skipped")
    assert dict(incident.terms)["latent_loss"] == torch.inf and incident.diagnosis.cause == "outlier-batch"
    assert found.nonfinite == 0 and found.measured.finite and found.memory
    drawn = draw(found.model, config, prepared(config).scale, steps=4)
    assert drawn.ids.shape == (4, config.model.text_length)
