"""Pairs of text and latents, from a configuration to what a loader reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset

from nanproof import UsageError
from nanproof_recipes.latent_dlm.config import Config
from nanproof_recipes.latent_dlm.data import corpus, latents


class Pairs(Dataset[dict[str, Tensor]]):
    """Windows of text and their latents; item i is {"ids": [L], "latent": [K, D]}."""

    def __init__(self, ids: Tensor, latents: Tensor) -> None:
        if len(ids) != len(latents):
            raise UsageError(f"{len(ids)} windows and {len(latents)} latents do not make pairs")
        self.ids, self.latents = ids, latents

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"ids": self.ids[index], "latent": self.latents[index]}

    @property
    def padded(self) -> bool:
        """Whether a window holds padding."""
        return bool((self.ids == corpus.PAD).any())

    def corrupt(self, index: int, factor: float = 1e25) -> Pairs:
        """The same pairs, but the first latent of this one multiplied: a few bytes of a record that were damaged on disk."""
        if not -len(self) <= index < len(self):
            raise UsageError(f"sample {index}: there are {len(self)}")
        damaged = self.latents.clone()
        damaged[index, 0] *= factor
        return Pairs(self.ids, damaged)


@dataclass(frozen=True, slots=True)
class Prepared:
    """What a run reads."""

    train: Pairs
    valid: Pairs
    scale: latents.Scale
    """That the latents of both have gone through; fitted on those of `train`."""
    checksum: str
    """sha256 of the windows of both and of what the latents and the split were made with."""


def make(config: Config) -> Prepared:
    """Text read, split by document, cut into windows, and given latents of mean 0 and variance 1."""
    model, data = config.model, config.data
    ids = [
        corpus.windows(docs, model.text_length, data.packed)
        for docs in corpus.split(corpus.documents(data.text), data.valid_share, data.seed)
    ]
    if data.packed:  # the last window, which is padded, would cost every other one a mask
        ids = [part[:-1] if len(part) > 1 and bool((part[-1] == corpus.PAD).any()) else part for part in ids]
    made = [latents.encode(part, model.latent_length, model.latent_width) for part in ids]
    scale = latents.Scale.fit(made[0])
    train, valid = (Pairs(part, scale.to(own)) for part, own in zip(ids, made, strict=True))
    settings: dict[str, object] = {
        "text_length": model.text_length,
        "latent_length": model.latent_length,
        "latent_width": model.latent_width,
        "matrix": latents.MATRIX_SEED,
        "packed": data.packed,
        "valid_share": data.valid_share,
        "seed": data.seed,
    }
    return Prepared(train, valid, scale, checksum(ids, settings))


def checksum(windows: Sequence[Tensor], settings: dict[str, object]) -> str:
    """sha256 in hex; numpy is not needed for it."""
    found = hashlib.sha256(json.dumps([settings, *(list(ids.shape) for ids in windows)], sort_keys=True).encode())
    for part in torch.cat([ids.reshape(-1) for ids in windows]).to(torch.int16).split(1 << 20):
        found.update(bytes(part.view(torch.uint8).tolist()))
    return found.hexdigest()
