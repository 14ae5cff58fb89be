"""How good a model is, on windows it was not trained on: the same masks and the same noise for every model and every arm."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanproof.numerics.precision import Precision
from nanproof_recipes.latent_dlm.config import Config
from nanproof_recipes.latent_dlm.data.dataset import Pairs
from nanproof_recipes.latent_dlm.model.diffusion import IGNORED, Noiser
from nanproof_recipes.latent_dlm.train.team import Team

SEED = 7
"""Of masks and noise."""
MOST = 32
"""Batches that are looked at."""
MODES = ("unconditional", "text_to_latent", "latent_to_text")


@dataclass(frozen=True, slots=True)
class Measured:
    """Of held-out windows. Unconditional where nothing else is said: text and latent are both noisy."""

    text_loss: float
    """Cross entropy of masked bytes, in nats."""
    text_accuracy: float
    """Masked bytes whose likeliest value is the right one."""
    latent_loss: float
    """Mean squared error of what is predicted of latents, never normalised."""
    text_loss_given_latent: float
    text_accuracy_given_latent: float
    latent_loss_given_text: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)

    @property
    def finite(self) -> bool:
        return all(math.isfinite(value) for value in asdict(self).values())


@torch.no_grad()
def measure(model: nn.Module, pairs: Pairs, noiser: Noiser, config: Config, precision: Precision | None, team: Team) -> Measured:
    """Each process looks at its own share of the windows; all of them get the sum. Torch's own generators are not touched."""
    size = 4 * config.training.train_batch_size
    count = min(len(pairs) // team.world, MOST * size)
    mine = pairs  # where there are fewer windows than processes, all look at all of them
    if count:
        mine = Pairs(pairs.ids[team.rank :: team.world][:count], pairs.latents[team.rank :: team.world][:count])
    training = model.training
    model.eval()
    try:
        sums = [_sums(model, mine, noiser, mode, size, precision, team) for mode in MODES]
    finally:
        model.train(training)
        reshard: Any = getattr(model, "reshard", None)
        if reshard is not None:  # FSDP2 waits for a backward with it; weights that are put back until then would not be seen
            reshard()
    both, latent, text = (team.sum(each).tolist() for each in sums)
    return Measured(
        text_loss=_mean(both[0], both[2]),
        text_accuracy=_mean(both[1], both[2]),
        latent_loss=_mean(both[3], both[4]),
        latent_loss_given_text=_mean(latent[3], latent[4]),
        text_loss_given_latent=_mean(text[0], text[2]),
        text_accuracy_given_latent=_mean(text[1], text[2]),
    )


def _mean(total: float, count: float) -> float:
    """NaN over nothing: of a window or two, no byte may be masked."""
    return total / count if count else math.nan


def _sums(
    model: nn.Module, pairs: Pairs, noiser: Noiser, mode: str, size: int, precision: Precision | None, team: Team
) -> Tensor:
    """Cross entropy, right answers and masked bytes; squared error and numbers of latents."""
    place = team.place
    generator = torch.Generator(place).manual_seed(SEED + team.rank)
    total = torch.zeros(5, dtype=torch.float64, device=place if place.type != "mps" else "cpu")
    for ids, latent in zip(pairs.ids.split(size), pairs.latents.split(size), strict=True):
        noised = noiser.draw({"ids": ids.to(place), "latent": latent.to(place)}, generator, mode)
        with precision.autocast() if precision is not None else torch.autocast(place.type, enabled=False):
            logits, predicted = model(*noised.inputs)
        labels, logits = noised.labels.flatten(), logits.flatten(0, 1).float()
        keep = labels != IGNORED
        entropy = nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        # argmax takes NaN for the largest: an answer from logits that are not finite is no answer.
        right = (logits.argmax(-1) == labels) & keep & logits.isfinite().all(-1)
        error = (predicted.float() - noised.target).square()[noised.counts]
        squares = error.to(total.device).double().sum()
        found = (entropy, right.sum(), keep.sum(), squares, torch.tensor(error.numel()))
        total += torch.stack([x.to(total.device).double() for x in found])
    return total
