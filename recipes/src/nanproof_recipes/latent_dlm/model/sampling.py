"""The model in use: text by unmasking it bit by bit, latents by DDPM or DDIM, each given the other or both from nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from nanproof import NanproofError, UsageError
from nanproof_recipes.latent_dlm.config import Config
from nanproof_recipes.latent_dlm.data.corpus import END, MASK, PAD
from nanproof_recipes.latent_dlm.data.latents import Scale, encode
from nanproof_recipes.latent_dlm.model.diffusion import scheduler
from nanproof_recipes.latent_dlm.model.model import MMDiT

Mode = Literal["unconditional", "text_to_latent", "latent_to_text"]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Samples, and how well text and latent fit each other."""

    ids: Tensor
    latent: Tensor
    agreement: list[float]
    """Of each sample: the cosine between its latent and what the latent of its text is. Chance is about 0."""


class NotFinite(NanproofError):
    """The model predicts numbers that are not finite: there is nothing to draw from."""


@torch.no_grad()
def draw(
    model: MMDiT,
    config: Config,
    scale: Scale,
    *,
    mode: Mode = "unconditional",
    count: int = 4,
    steps: int = 50,
    how: Literal["ddpm", "ddim"] = "ddpm",
    temperature: float = 1.0,
    seed: int = 0,
    ids: Tensor | None = None,
    latent: Tensor | None = None,
) -> Drawn:
    """
    Args:
        steps: forwards that it takes, or a few more where the steps of noise cannot be parted evenly into so many; text and
            latents get cleaner together.
        how: of latents.
        temperature: of bytes; 0 takes the likeliest.
        ids: with "text_to_latent", the texts, [count, tokens].
        latent: with "latent_to_text", the latents, [count, latents, width].
    """
    if not 1 <= steps <= config.loss.diffusion_steps:
        raise UsageError(f"--steps {steps}: a whole number from 1 to {config.loss.diffusion_steps} is needed")
    if not temperature >= 0:
        raise UsageError(f"--temperature {temperature}: a number of 0 or more is needed")
    # Steps of noise are counted down by a whole number: with any other count, latents would begin in the middle of the schedule.
    steps = config.loss.diffusion_steps // (config.loss.diffusion_steps // steps)
    place = next(model.parameters()).device
    generator = torch.Generator(place).manual_seed(seed)
    shape = config.model
    if mode == "text_to_latent":
        if ids is None:
            raise UsageError("text_to_latent: a text is needed")
        if ids.shape[1:] != (shape.text_length,):
            raise UsageError(f"text_to_latent: ids of shape {list(ids.shape)}; windows of {shape.text_length} are needed")
        text, text_given = ids.to(place), True
    else:
        text, text_given = torch.full((count, shape.text_length), MASK, device=place), False
    noise = scheduler(how, config)
    noise.set_timesteps(steps, device=place)
    if mode == "latent_to_text":
        if latent is None:
            raise UsageError("latent_to_text: a latent is needed")
        if latent.shape[1:] != (shape.latent_length, shape.latent_width):
            wanted = f"[count, {shape.latent_length}, {shape.latent_width}]"
            raise UsageError(f"latent_to_text: a latent of shape {list(latent.shape)}; {wanted} is needed")
        mixed, latent_given, text = latent.to(place), True, text[:1].expand(len(latent), -1).clone()
    else:
        size = (len(text), shape.latent_length, shape.latent_width)
        mixed, latent_given = torch.randn(size, device=place, generator=generator), False
    keep = (text != PAD) if bool((text == PAD).any()) else None
    training = model.training
    model.eval()
    try:
        for i, step in enumerate(noise.timesteps):
            now, later = 1 - i / steps, 1 - (i + 1) / steps
            text_time = torch.full((len(text),), 0.0 if text_given else now, device=place)
            latent_time = (
                torch.full_like(text_time, 0.0) if latent_given else ((step + 1) / config.loss.diffusion_steps).expand(len(text))
            )
            logits, predicted = model(text, mixed, text_time, latent_time.to(text_time), keep)
            _check(logits, predicted)
            if not text_given:
                text = _unmasked(text, logits.float(), now, later, temperature, generator)
            if not latent_given:
                mixed = noise.step(predicted.float(), step, mixed, generator=generator).prev_sample
        _check(mixed)  # what is predicted may be finite, and too large to be gone on with
    finally:
        model.train(training)
    return Drawn(text.cpu(), mixed.cpu(), agreement(text.cpu(), mixed.cpu(), scale))


def _check(*tensors: Tensor) -> None:
    if not all(bool(tensor.isfinite().all()) for tensor in tensors):
        raise NotFinite("the model predicts numbers that are not finite: nothing can be drawn from it")


def _unmasked(ids: Tensor, logits: Tensor, now: float, later: float, temperature: float, generator: torch.Generator) -> Tensor:
    """One step back: of the bytes that are still masked, so many are drawn that a share of `later` stays masked."""
    masked = ids == MASK
    chosen = masked & (torch.rand(ids.shape, device=ids.device, generator=generator) >= later / now)
    if temperature == 0:
        drawn = logits.argmax(-1)
    else:
        # Divided after the largest is 0: however low the temperature is, that stays finite.
        chances = torch.softmax((logits - logits.amax(-1, keepdim=True)) / temperature, -1)
        drawn = torch.multinomial(chances.flatten(0, 1), 1, generator=generator).view(ids.shape)
    return torch.where(chosen, drawn, ids)


def agreement(ids: Tensor, latent: Tensor, scale: Scale) -> list[float]:
    """Of each sample, how well its latent is the latent of its text."""
    own = scale.to(encode(ids.masked_fill(ids == MASK, END), latent.shape[1], latent.shape[2]))
    found: list[float] = cosine_similarity(own.flatten(1), latent.float().flatten(1), dim=1).tolist()
    return found
