"""The model of an arm that was trained, in its folder: weights, configuration and the scale of latents. Nothing else is needed to
measure it or to draw from it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanproof import UsageError
from nanproof.numerics.precision import Precision, choose
from nanproof_recipes.latent_dlm.config import Config
from nanproof_recipes.latent_dlm.data.latents import Scale
from nanproof_recipes.latent_dlm.model.model import MMDiT
from nanproof_recipes.library import reason, sync, write_whole

MODEL, CONFIG, SCALE = "model.safetensors", "config.yaml", "scale.json"


@dataclass(frozen=True, slots=True)
class Kept:
    """What is in the folder, ready for use."""

    model: MMDiT
    config: Config
    scale: Scale
    precision: Precision | None
    """As it was trained with; None where the weights themselves are in bf16."""


def keep(folder: Path, weights: dict[str, Tensor], config: Config, scale: Scale) -> None:
    """The weights last, and whole or not at all."""
    from safetensors.torch import save_file

    write_whole(folder / CONFIG, config.to_yaml())
    write_whole(folder / SCALE, json.dumps(scale.state()) + "\n")
    partial = folder / f".{MODEL}.partial"
    save_file(weights, partial)
    sync(partial)
    partial.replace(folder / MODEL)


def load(folder: Path, place: torch.device) -> Kept:
    """The model of an arm; what is missing or damaged is named."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if not (folder / MODEL).is_file():
        raise UsageError(
            f"{folder} holds no trained model. `nanproof recipe latent-dlm train --arm {folder.name} --out {folder.parent}` "
            "trains it"
        )
    config = Config.load(folder / CONFIG)
    try:
        scale = Scale.from_state(json.loads((folder / SCALE).read_text(encoding="utf-8")))
        if len(scale.mean) != config.model.latent_width:
            raise ValueError(f"{SCALE} is of latents of width {len(scale.mean)}, not {config.model.latent_width}")
        weights = load_file(folder / MODEL)
        model = MMDiT(config.model)
        in_bf16 = all(tensor.dtype == torch.bfloat16 for tensor in weights.values())
        if in_bf16:
            model.to(torch.bfloat16)
        model.load_state_dict(weights)
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        said = reason(error).splitlines()[0]
        raise UsageError(f"{folder} does not hold a model of this recipe ({said}). Train it again, with --again") from error
    model.to(place)
    return Kept(model, config, scale, None if in_bf16 else choose(model, place, config.training.dtype))
