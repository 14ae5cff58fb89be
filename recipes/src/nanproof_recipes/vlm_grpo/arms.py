"""The arms of vlm-grpo: reinforcement learning as reported, with the document's patch, under nanproof, and fixed.

A judge appends its verdict to each reply, in tokens that do not count in the loss. The policy must not write the judge's token
itself. `broken` lowers the logit of that token in the policy but not in the reference, and stock TRL takes exp of the difference
before it masks it. The variant `group` is another failure from the same report: groups of one reply, whose standard deviation is
NaN. `patched` changes only what the document changed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from nanproof import UsageError
from nanproof_recipes.arms import BaseSetting, check_above, check_choice, check_least, check_seed, find, given

WARM = "warm"
"""The folder of the warm start, which every arm begins with."""
LOWERED = 120.0
"""How far the reported arms lower the logit of the judge's token in the policy: exp(120) is Inf in fp32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting(BaseSetting):
    """All that decides how one model is trained, from the warm start on."""

    trainer: Literal["trl", "loop"] = "trl"
    """TRL's GRPOTrainer, or the loop of this recipe, which takes a group of one and needs no TRL."""
    ban: Literal["policy", "sampling"] = "policy"
    """How the judge's token is kept from replies: by its logit in the policy alone, or where tokens are drawn."""
    plain: bool = True
    """In the loop: the loss as people write it, with exp before the mask. TRL has its own."""
    patched: bool = False
    """The document's logits processor and callback."""
    protect: bool = False
    heal: bool = False
    lr: float = 1e-3
    batch: int = 128
    """Replies a step, of all groups together."""
    group: int = 8
    steps: int = 100
    warmup: int = 5
    max_norm: float = 1.0
    beta: float = 0.02
    """Weight of the divergence from the reference."""
    rank: int = 16
    alpha: int = 32
    temperature: float = 1.0
    precision: str = "as-loaded"
    """"as-loaded": fp32 throughout; "auto", "bf16", "fp32": chosen by nanproof.numerics.precision."""
    seed: int = 0

    @property
    def name(self) -> str:
        """The name of its row and its folder."""
        name = f"{self.arm}-{self.variant}" if self.variant else self.arm
        return f"{name}-seed-{self.seed}" if self.seed else name

    @property
    def may_lose_device(self) -> bool:
        """Whether it may draw from NaN, which on CUDA ends the process' use of the device."""
        return not (self.protect or self.patched)


BROKEN = Setting(
    arm="broken",
    says="TRL as it comes; the judge's token, which does not count, has its logit lowered by 120 in the policy alone",
)
GROUP = replace(
    BROKEN,
    variant="group",
    trainer="loop",
    ban="sampling",
    batch=32,
    group=1,
    says="a plain loop with groups of one reply: the deviation of one number is NaN",
)
PATCHED = replace(
    BROKEN,
    arm="patched",
    patched=True,
    warmup=10,
    says="the document's fix: logits clipped to 30, NaN replaced, a floor of 1e-8 under probabilities, gradients looked at in "
    "on_step_end, warm-up 10",
)
GUARDED = replace(BROKEN, arm="guarded", protect=True, heal=True, says="broken, under nanproof")
GUARDED_GROUP = replace(GROUP, arm="guarded", protect=True, heal=True, says="broken-group, under nanproof")
FIXED = replace(
    BROKEN,
    arm="fixed",
    ban="sampling",
    plain=False,
    protect=True,
    warmup=10,
    max_norm=0.5,
    precision="auto",
    says="the judge's token is banned where tokens are drawn, masked before exp, clipped to 0.5, warm-up 10, guarded",
)
SETTINGS = {(s.arm, s.variant): s for s in (BROKEN, GROUP, PATCHED, GUARDED, GUARDED_GROUP, FIXED)}


def setting(arm: str, variant: str = "", **changes: Any) -> Setting:
    """Return the setting of an arm with some changes; a change that is None is ignored."""
    return changed(find(SETTINGS, arm, variant), **changes)


def changed(found: Setting, **changes: Any) -> Setting:
    """Return the setting with other values; a change that is None is ignored."""
    changes = given(changes)
    check_choice("trainer", changes.get("trainer", "trl"), ("trl", "loop"))
    if found.variant == "group":
        changes.pop("trainer", None)  # TRL refuses a group of one
        if changes.get("group", 1) != 1:
            raise UsageError(f"--group {changes['group']}: {found.name} is about groups of one. Choose another arm")
    made = replace(found, **changes)
    values = made.to_json()
    check_above(values, "lr", "max_norm", "temperature")
    check_least(values, batch=1, steps=1, warmup=0, rank=1, alpha=1, beta=0)
    if made.group < 2 and made.variant != "group":
        raise UsageError(f"--group {made.group}: a group of one has no mean to differ from; sample at least 2 replies")
    if made.batch % made.group:
        raise UsageError(f"--batch {made.batch}: replies do not divide into groups of {made.group}")
    check_choice("precision", made.precision, ("as-loaded", "auto", "bf16", "fp32"))
    check_seed(made.seed)
    return made
