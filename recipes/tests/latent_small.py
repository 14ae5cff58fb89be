"""latent-dlm at size tiny, for fewer steps: every arm is trained once a test run, through the command line; tests look at what it
left."""

from __future__ import annotations

import pytest

from compared_once import compared_once

SMALL = (
    "data.valid_share=0.004",
    "training.steps=60",
    "training.warmup_steps=5",
    "training.train_batch_size=8",
    "training.eval_every=20",
    "training.checkpoint_every=10",
    "training.prove_steps=3",
    "training.log_every=5",
)
KEYS = tuple(change.partition("=")[0] for change in SMALL)
WORDS = [word for change in SMALL for word in ("--set", change)]
ARMS = ("broken", "patched", "guarded", "fixed", "fixed-seed-1", "fixed-seed-2")


@pytest.fixture(scope="session")
def small_comparison(tmp_path_factory):
    for package in ("diffusers", "yaml", "safetensors"):
        pytest.importorskip(package)

    import torch

    torch.set_num_threads(1)
    return compared_once(tmp_path_factory, "latent-dlm", ["latent-dlm", "compare", *WORDS, "--seeds", "2"])
