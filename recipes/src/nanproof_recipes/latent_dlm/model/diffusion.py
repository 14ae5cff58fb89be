"""What the model is trained on: bytes are masked, latents get noise, and the loss has two terms.

Text: each sample has a time t from 0 to 1, and each of its bytes is masked with probability t (the log-linear schedule). The loss
is the cross entropy of the masked bytes, averaged over all of them; padding is never masked. Latents: DDPM with the cosine
schedule, by diffusers. A sample is trained in one of three modes: both noisy, text given, latent given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize

from nanproof.numerics.losses import masked_cross_entropy, masked_mse
from nanproof_recipes.latent_dlm.config import Config
from nanproof_recipes.latent_dlm.data.corpus import MASK, PAD
from nanproof_recipes.machine import needs

IGNORED = -100
PREDICTIONS = {"epsilon": "epsilon", "v": "v_prediction", "x0": "sample"}
"""Our names, and those of diffusers."""


FARTHEST = 6.0
"""Clean latents have mean 0 and variance 1 and hardly ever a number beyond this. Sampling keeps to it: where nearly all is noise,
a small error in the noise that is predicted is a thousandfold error in the latent that is told from it."""


class Noise(Protocol):
    """What is used of a scheduler of diffusers."""

    alphas_cumprod: Tensor

    def add_noise(self, original_samples: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor: ...
    def get_velocity(self, sample: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor: ...


def scheduler(kind: str, config: Config) -> Any:
    """A scheduler of diffusers, "ddpm" or "ddim", with the cosine schedule."""
    needs("diffusers")
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler
    from diffusers.schedulers.scheduling_ddpm import DDPMScheduler

    chosen = {"ddpm": DDPMScheduler, "ddim": DDIMScheduler}[kind]
    return chosen(
        num_train_timesteps=config.loss.diffusion_steps,
        beta_schedule="squaredcos_cap_v2",
        prediction_type=PREDICTIONS[config.loss.prediction],
        clip_sample=True,
        clip_sample_range=FARTHEST,
    )


@dataclass(frozen=True, slots=True)
class Noised:
    """A batch as the model gets it, and what it is to predict."""

    ids: Tensor
    latent: Tensor
    text_time: Tensor
    latent_time: Tensor
    keep: Tensor | None
    labels: Tensor
    """The byte at masked positions, IGNORED elsewhere."""
    target: Tensor
    counts: Tensor
    """Samples whose latent has noise, [batch]."""

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        return self.ids, self.latent, self.text_time, self.latent_time, self.keep


class Noiser:
    """Draws times, modes, masks and noise. All of it on the device, from torch's own generators: a step that is run again under
    the same random state is the same."""

    def __init__(self, config: Config, padded: bool = True) -> None:
        """`padded`: windows may hold padding. Where none does, attention needs no mask, and has faster ways."""
        self._padded = padded
        self._steps, self._prediction, self._modes = config.loss.diffusion_steps, config.loss.prediction, config.modes
        self._schedule: Noise = scheduler("ddpm", config)

    def draw(self, batch: Mapping[str, Tensor], generator: torch.Generator | None = None, mode: str | None = None) -> Noised:
        """`mode`: the same for every sample, "unconditional", "text_to_latent" or "latent_to_text"; None: by the shares."""
        ids, latent = batch["ids"], batch["latent"]
        size, device = len(ids), ids.device

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, device=device, generator=generator)

        # One draw, spread evenly over the batch: less noise in the loss than one each.
        spread = torch.arange(size, device=device) / size
        text_time = (uniform(1) + spread) % 1
        step = ((uniform(1) + spread[torch.randperm(size, device=device, generator=generator)]) % 1 * self._steps).long()
        text_noisy, latent_noisy = self._noisy(uniform(size), mode)
        text_time = text_time * text_noisy
        masked = (uniform(*ids.shape) < text_time[:, None]) & (ids != PAD)
        noise = torch.randn(latent.shape, device=device, dtype=latent.dtype, generator=generator)
        mixed = torch.where(latent_noisy[:, None, None], self._schedule.add_noise(latent, noise, step), latent)
        return Noised(
            ids=ids.masked_fill(masked, MASK),
            latent=mixed,
            text_time=text_time,
            latent_time=torch.where(latent_noisy, (step + 1) / self._steps, 0.0),
            keep=ids != PAD if self._padded else None,
            labels=ids.masked_fill(~masked, IGNORED),
            target=self._target(latent, noise, step),
            counts=latent_noisy,
        )

    def _noisy(self, chance: Tensor, mode: str | None) -> tuple[Tensor, Tensor]:
        """Of which samples the text, and of which the latent, is noisy."""
        if mode is not None:
            every = torch.ones_like(chance, dtype=torch.bool)
            return every & (mode != "text_to_latent"), every & (mode != "latent_to_text")
        text_given = chance < self._modes.text_to_latent
        latent_given = ~text_given & (chance < self._modes.text_to_latent + self._modes.latent_to_text)
        return ~text_given, ~latent_given

    def _target(self, latent: Tensor, noise: Tensor, step: Tensor) -> Tensor:
        if self._prediction == "epsilon":
            return noise
        return self._schedule.get_velocity(latent, noise, step) if self._prediction == "v" else latent


Terms = dict[str, Tensor]
"""The terms of the loss by name, not weighted."""


def exact(model: nn.Module, noised: Noised, normalized: bool = False) -> Terms:
    """As it should be: in fp32, over what counts and nothing else. A batch in which nothing is masked teaches no text.
    `normalized` compares latents at length 1: an option, for it makes the loss blind to their scale."""
    logits, predicted = model(*noised.inputs)
    target = noised.target
    if normalized:
        predicted, target = normalize(predicted.float(), dim=-1), normalize(target, dim=-1)
    return {
        "text_loss": masked_cross_entropy(logits, noised.labels, shift=False, empty="neutral"),
        "latent_loss": masked_mse(predicted, target, noised.counts, empty="neutral"),
    }


def original(model: nn.Module, noised: Noised) -> Terms:
    """As the reported training computed it: in whatever dtype the model gives."""
    logits, predicted = model(*noised.inputs)
    mask = (noised.labels != IGNORED).to(logits.dtype)
    each = cross_entropy(logits.flatten(0, 1), noised.labels.flatten(), ignore_index=IGNORED, reduction="none")
    return {
        "text_loss": (each * mask.flatten()).sum() / mask.sum().clamp(min=1),
        "latent_loss": mse_loss(*_that_count(predicted, noised)),
    }


def document(model: nn.Module, noised: Noised) -> Terms:
    """As the document has it: 1e-8 on a sum that is 1 at least, latents of length 1, nothing above 100."""
    logits, predicted = model(*noised.inputs)
    mask = (noised.labels != IGNORED).to(logits.dtype)
    each = cross_entropy(logits.flatten(0, 1), noised.labels.flatten(), ignore_index=IGNORED, reduction="none")
    text = (each * mask.flatten()).sum() / (mask.sum().clamp(min=1) + 1e-8)
    predicted, target = (normalize(x, p=2.0, dim=-1, eps=1e-8) for x in _that_count(predicted, noised))
    latent = mse_loss(predicted, target)
    return {"text_loss": torch.clamp(text, max=100.0), "latent_loss": torch.clamp(latent, max=100.0)}


def _that_count(predicted: Tensor, noised: Noised) -> tuple[Tensor, Tensor]:
    """A latent that was given is no target: there the difference is 0."""
    target = noised.target.to(predicted.dtype)
    return predicted, torch.where(noised.counts[:, None, None], target, predicted.detach())
