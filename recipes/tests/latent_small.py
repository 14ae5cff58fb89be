"""latent-dlm at size tiny, for fewer steps: every arm is trained once a session, through the command line; tests look at what it
left."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SMALL = (
    "data.valid_share=0.01",
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


@dataclass(frozen=True)
class Compared:
    """A folder with all arms, and what the command said."""

    out: Path
    said: Any


@pytest.fixture(scope="session")
def small_comparison(tmp_path_factory):
    for package in ("diffusers", "yaml", "safetensors"):
        pytest.importorskip(package)
    import torch
    from typer.testing import CliRunner

    from nanproof.cli import app

    torch.set_num_threads(1)
    out = tmp_path_factory.mktemp("latent-dlm")
    words = ["recipe", "latent-dlm", "compare", *WORDS, "--seeds", "2", "--out", str(out)]
    return Compared(out, CliRunner().invoke(app, words))
