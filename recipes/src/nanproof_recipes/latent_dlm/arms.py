"""The arms of latent-dlm: training as reported, with the document's patch, under nanproof, and fixed.

All arms read the same data, with the latent of one sample damaged: the sample that the arm meets at a step in the middle of its
run. Another seed or batch size therefore damages another sample. `broken` shares its bf16 weights, loop and losses with the
report; `patched` changes only what the document changed.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from nanproof_recipes.arms import check_choice
from nanproof_recipes.latent_dlm.config import Config

DAMAGED_AT = 0.4
"""The part of the run after which the damaged sample is met; earlier where the first epoch is shorter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """All that makes an arm what it is, besides the configuration."""

    arm: str
    says: str
    """What is different in this arm, in one line."""
    weights: Literal["bf16", "fp32"] = "bf16"
    loop: Literal["original", "document", "guarded"] = "original"
    losses: Literal["original", "document", "exact"] = "original"
    heal: bool = False
    reported: bool = True
    """With the learning rate, clipping and weights of the report, where the configuration recommends others."""
    damaged: bool = True
    seed: int | None = None
    """Of a further run of the arm; None: that of the configuration."""

    @property
    def name(self) -> str:
        """The name of its row and its folder."""
        return self.arm if self.seed is None else f"{self.arm}-seed-{self.seed}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


BROKEN = Setting(
    arm="broken", says="weights in bf16; after clipping the gradients are looked at for NaN alone, zeroed, and stepped on"
)
PATCHED = replace(
    BROKEN,
    arm="patched",
    loop="document",
    losses="document",
    says="the document's fix: bad losses and norms skipped, losses clamped to 100, latents normalised; learning rate and "
    "clipping halved, warm-up and accumulation doubled, latent weight 0.1",
)
GUARDED = replace(BROKEN, arm="guarded", loop="guarded", heal=True, says="broken, under nanproof with healing on")
FIXED = replace(
    BROKEN,
    arm="fixed",
    weights="fp32",
    loop="guarded",
    losses="exact",
    reported=False,
    says="weights in fp32, forward in bf16 autocast, losses over what counts, guarded",
)
SETTINGS = {setting.arm: setting for setting in (BROKEN, PATCHED, GUARDED, FIXED)}

REPORTED: dict[str, dict[str, Any]] = {
    "tiny": {},
    "base": {
        "optimizer.lr": 1e-4,
        "optimizer.grad_clip_norm": 1.0,
        "loss.latent_loss_weight": 1.0,
        "training.gradient_accumulation_steps": 1,
    },
}
"""By size, what was reported where the configuration recommends something else."""


def setting(arm: str, **changes: Any) -> Setting:
    """Return the setting of an arm by its name: "fixed", or "fixed-seed-1"."""
    name, _, seed = arm.partition("-seed-")
    if name in SETTINGS and seed.isascii() and seed.isdigit() and len(seed) < 19:
        changes = {"seed": int(seed), **changes}
    else:
        check_choice("arm", arm, list(SETTINGS))
    return replace(SETTINGS[name], **changes)


def configured(config: Config, setting: Setting, chosen: frozenset[str] = frozenset()) -> Config:
    """The configuration as the arm has it. `chosen`: keys that were set by hand, which stay as they are.

    What the document changes it changes relative to the report: the size tiny was never reported, and has a rate of its own.
    """
    changes: dict[str, Any] = {}
    if setting.reported:
        changes |= REPORTED[config.size]
    if setting.arm == "patched":
        rate, norm = changes.get("optimizer.lr", config.optimizer.lr), config.optimizer.grad_clip_norm
        norm = changes.get("optimizer.grad_clip_norm", norm)
        changes |= {
            "optimizer.lr": rate / 2,
            "optimizer.grad_clip_norm": norm / 2 if norm else 1.0,
            "loss.latent_loss_weight": 0.1,
            "training.gradient_accumulation_steps": 2,
            "training.warmup_steps": max(config.training.warmup_steps, min(2000, 2 * config.training.warmup_steps)),
        }
    changes = {key: value for key, value in changes.items() if key not in chosen}
    if setting.seed is not None:  # of the arm itself: it has it in its name
        changes["training.seed"] = setting.seed
    return config.with_(**changes)
