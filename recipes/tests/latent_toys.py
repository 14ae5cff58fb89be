"""A minuscule latent-dlm for tests: settings, data made of random bytes, and a run of an arm in a folder."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from nanproof_recipes.latent_dlm.arms import FIXED
from nanproof_recipes.latent_dlm.config import Config
from nanproof_recipes.latent_dlm.data import latents
from nanproof_recipes.latent_dlm.data.corpus import PAD
from nanproof_recipes.latent_dlm.data.dataset import Pairs, Prepared
from nanproof_recipes.latent_dlm.train.team import Team

SMALL = {
    "model.layers": 1,
    "model.width": 16,
    "model.heads": 2,
    "model.text_length": 16,
    "model.latent_length": 2,
    "model.latent_width": 4,
    "optimizer.lr": 1e-3,
    "training.steps": 10,
    "training.warmup_steps": 2,
    "training.dtype": "fp32",
    "training.train_batch_size": 4,
    "training.eval_every": 1000,
    "training.checkpoint_every": 1000,
    "training.log_every": 1,
    "training.prove_steps": 1,
    "loss.diffusion_steps": 50,
}
FRESH = replace(FIXED, damaged=False)
"""The arm fixed, on good data."""
ALONE = Team(place=torch.device("cpu"))


def small(**changes) -> Config:
    """Keys are written with two underscores: small(optimizer__lr=1e-4)."""
    return Config.load("tiny").with_(**SMALL | {key.replace("__", "."): value for key, value in changes.items()})


def prepared(config: Config, count: int = 64, padded: bool = False, seed: int = 0) -> Prepared:
    """Windows of random letters and their latents."""
    generator = torch.Generator().manual_seed(seed)
    shape = config.model
    parts = []
    for size in (count, 12):
        ids = torch.randint(97, 123, (size, shape.text_length), generator=generator)
        if padded:
            ids[::2, shape.text_length // 2 :] = PAD
        parts.append(ids)
    made = [latents.encode(ids, shape.latent_length, shape.latent_width) for ids in parts]
    scale = latents.Scale.fit(made[0])
    train, valid = (Pairs(ids, scale.to(own)) for ids, own in zip(parts, made, strict=True))
    return Prepared(train, valid, scale, "")


def batch(config: Config, size: int = 4, seed: int = 0, padded: bool = False) -> dict[str, torch.Tensor]:
    pairs = prepared(config, size, padded, seed).train
    return {"ids": pairs.ids, "latent": pairs.latents}


def lines(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.state_dict().items()}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
