"""What the two ways of training share: what came of it, and the line that is logged at every step."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from torch import nn

from nanproof.numerics.precision import Ask, Precision, choose
from nanproof_recipes.arms import check_choice
from nanproof_recipes.library import encode, write_whole
from nanproof_recipes.machine import device
from nanproof_recipes.results import BaseTrained
from nanproof_recipes.vlm_grpo.arms import Setting

LOG = "training_log.jsonl"
LOGGED = ("loss", "reward", "reward_std", "kl", "entropy", "grad_norm")


@dataclass
class Trained(BaseTrained):
    """A model after its training. Its log has a line a step: `step`, and what of LOGGED was there."""

    setting: Setting
    device_lost: bool = False
    """Sampling from NaN on CUDA: an assertion in a kernel, after which this process cannot use the device."""
    nonfinite: int | None = None
    """Trainable tensors that were not finite when that was last looked at, where the device is lost."""
    bad_rows: int | None = None
    """Rows of logits with a NaN or Inf that were sampled from, a row a token; or replies that ended because of one."""

    @property
    def nonfinite_steps(self) -> int:
        """Steps whose logged loss or gradient norm was NaN or Inf."""
        return sum(not all(math.isfinite(line.get(name, 0.0)) for name in ("loss", "grad_norm")) for line in self.log)


def chosen_precision(model: nn.Module, asked: str) -> Precision:
    """What `auto` stands for: on a CPU fp32, for at this size casting costs more than it saves. Never fp16: it needs a loss
    scale, which neither the warm start nor the loop of this recipe has."""
    place = device()
    check_choice("precision", asked, ("auto", "bf16", "fp32"))
    if asked == "auto" and place.type == "cpu":
        return replace(choose(model, place, "fp32"), reason="on a CPU, casting so small a model costs more than it saves")
    chosen = choose(model, place, cast(Ask, asked))
    return choose(model, place, "fp32") if chosen.scaler else chosen


def died_of_sampling(error: BaseException) -> bool:
    """Whether this is what torch.multinomial raises on probabilities that are none; on CUDA, where it is an assertion in the
    kernel, whether it may be that."""
    return isinstance(error, RuntimeError) and ("probability tensor" in str(error) or "device-side assert" in str(error))


def died(trained: Trained, error: RuntimeError) -> None:
    """The ending of an arm that died of sampling."""
    first = str(error).strip().splitlines()[0]
    trained.ending = f"raised {type(error).__name__}: {first}"
    trained.device_lost = "device-side assert" in first


def write_log(folder: Path, log: Sequence[Mapping[str, float]]) -> Path:
    """The lines as JSON, whole or not at all."""
    path = folder / LOG
    lines = [{k: encode(v) if isinstance(v, float) else v for k, v in line.items()} for line in log]
    write_whole(path, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
    return path


def said(line: Mapping[str, float]) -> str:
    """A step in a few words, for a bar."""
    return ", ".join(f"{name} {line[name]:.3g}" for name in ("reward", "kl", "grad_norm") if name in line)
