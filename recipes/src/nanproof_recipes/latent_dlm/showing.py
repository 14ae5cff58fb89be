"""Samples for people to look at: text and latents drawn from a model, each with how well the two fit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from nanproof import UsageError
from nanproof_recipes.arms import check_choice, check_seed
from nanproof_recipes.latent_dlm.data.corpus import decode, windows
from nanproof_recipes.latent_dlm.data.dataset import Pairs, make
from nanproof_recipes.latent_dlm.data.latents import encode
from nanproof_recipes.latent_dlm.model.sampling import Mode, NotFinite, draw
from nanproof_recipes.latent_dlm.train.keeping import Kept, load
from nanproof_recipes.machine import device, reproducible

EACH = 2
"""Samples of each mode that a result keeps."""
STEPS = 32
"""Forwards that each of those takes."""


@dataclass(frozen=True, slots=True)
class Shown:
    """One sample."""

    mode: Mode
    text: str
    """That was drawn, or that was given."""
    agreement: float
    """Cosine between its latent and the latent of its text; chance is about 0."""
    given: str | None = None
    """The text that was given, or whose latent was."""
    latent: tuple[tuple[float, ...], ...] = ()
    """That was drawn, or that was given."""

    @property
    def told(self) -> str:
        """What was given, in words."""
        if self.given is None:
            return "nothing"
        return self.given if self.mode == "text_to_latent" else f"the latent of: {self.given}"

    def to_json(self) -> dict[str, Any]:
        given = {} if self.given is None else {"given": self.given}
        latent = [[round(x, 4) for x in row] for row in self.latent]
        return {"mode": self.mode.replace("_", "-"), **given, "text": self.text, "agreement": self.agreement, "latent": latent}


def show(
    kept: Kept,
    mode: str,
    *,
    given: Tensor | None = None,
    count: int = EACH,
    steps: int = STEPS,
    how: Literal["ddpm", "ddim"] = "ddpm",
    temperature: float = 1.0,
    seed: int = 0,
) -> list[Shown]:
    """Samples of one mode. `given`: windows of text, [count, tokens]: the text itself, or that whose latent is given."""
    chosen = mode.replace("-", "_")
    check_choice("mode", chosen.replace("_", "-"), [name.replace("_", "-") for name in get_args(Mode)])
    check_seed(seed, bits=63)
    shape = kept.config.model
    more: dict[str, Any] = {}
    if chosen == "unconditional":
        given = None
    elif given is None:
        raise UsageError(f"--mode {mode}: a text is needed. Give it with --text")
    elif chosen == "text_to_latent":
        more = {"ids": given}
    else:
        more = {"latent": kept.scale.to(encode(given, shape.latent_length, shape.latent_width))}
    drawn = draw(
        kept.model,
        kept.config,
        kept.scale,
        mode=chosen,  # type: ignore[arg-type]
        count=count,
        steps=steps,
        how=how,
        temperature=temperature,
        seed=seed,
        **more,
    )
    known = [None] * len(drawn.ids) if given is None else [decode(ids, past_end=True) for ids in given]
    return [
        Shown(chosen, decode(ids, past_end=True), agreement, before, tuple(map(tuple, latent.tolist())))  # type: ignore[arg-type]
        for ids, latent, agreement, before in zip(drawn.ids, drawn.latent, drawn.agreement, known, strict=True)
    ]


def window_of(text: str, length: int, count: int) -> Tensor:
    """A text as so many equal windows: its first bytes, an end, and padding."""
    if not text:
        raise UsageError("--text is empty. Give some words")
    return windows([text.encode("utf-8", "surrogateescape")], length, packed=False)[:1].expand(count, -1)


def samples(kept: Kept, valid: Pairs) -> list[dict[str, str]]:
    """Of every mode, for a result: the same seeds and the same held-out windows for every arm. A model that is not finite says
    so instead."""
    found: list[dict[str, str]] = []
    given = valid.ids[torch.arange(EACH) % len(valid)]
    for mode in get_args(Mode):
        try:
            drawn = show(kept, mode, given=given, steps=min(STEPS, kept.config.loss.diffusion_steps))
        except NotFinite as error:
            found.append({"mode": mode, "given": "", "drawn": str(error), "agreement": ""})
            continue
        for each in drawn:
            text = "a latent" if mode == "text_to_latent" else each.text
            told = {"mode": mode, "given": each.told, "drawn": text, "agreement": f"{each.agreement:.3f}"}
            found.append(told)
    return found


def drawn_from(folder: Path, mode: str, *, text: str | None = None, count: int, **more: Any) -> list[Shown]:
    """Samples from the model of an arm, in its folder. Without a text, held-out windows are given."""
    kept = load(folder, device())
    given = None
    if mode != "unconditional":
        length = kept.config.model.text_length
        given = make(kept.config).valid.ids[:count] if text is None else window_of(text, length, count)
    elif text is not None:
        raise UsageError("--text: nothing is given with --mode unconditional. Choose text-to-latent or latent-to-text")
    with reproducible():
        return show(kept, mode, given=given, count=count, **more)
