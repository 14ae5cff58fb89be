"""The arms of units-sft as plain settings.

`broken` is the reported setting, plus the warm-up that every arm has. `patched` changes only what one document changed.
`guarded` is `broken` under nanproof with healing on. `fixed` is the right setting.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from nanproof import UsageError
from nanproof_recipes.arms import BaseSetting, check_above, check_choice, check_least, check_seed, find, given
from nanproof_recipes.units_sft.data.questions import FORMS, Form

Weights = Literal["fp16", "fp32"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting(BaseSetting):
    """All that decides how one model is trained."""

    weights: Weights = "fp16"
    """What the model and its adapters are held in."""
    precision: str = "as-loaded"
    """"as-loaded": nothing but the weights decides; "fp16-flag" and "bf16-flag": the Trainer's switch, whatever the weights are;
    "auto", "bf16", "fp16", "fp32": chosen by nanproof.numerics.precision, over fp32 weights."""
    optim: str = "adamw_torch"
    prompt: Literal["plain", "ends-in-tag"] = "plain"
    patch: Literal["", "000", "002"] = ""
    protect: bool = False
    heal: bool = False
    form: Form = "worked"
    lr: float = 2e-4
    batch: int = 32
    epochs: int = 3
    warmup: int = 50
    rank: int = 4
    alpha: int = 16
    gradient_checkpointing: bool = True
    seed: int = 0
    start: str = ""
    """The arm whose adapters are trained further; empty: new adapters."""


BROKEN = Setting(arm="broken", says="weights and adapters in pure fp16, AdamW that is not fused")
REPORTED: tuple[Setting, ...] = (
    BROKEN,
    replace(
        BROKEN,
        variant="double",
        precision="fp16-flag",
        says="the same with fp16=True on top (on a CPU the Trainer ignores it)",
    ),
    replace(
        BROKEN,
        variant="prompt",
        weights="fp32",
        prompt="ends-in-tag",
        says="fp32, but the prompt ends in <answer>, so that the reply has no tag to be parsed",
    ),
    replace(
        BROKEN,
        arm="patched",
        variant="000",
        patch="000",
        precision="bf16-flag",
        says="a loss of 0 or NaN becomes 1e-6, NaN gradients are zeroed in on_step_end, bf16=True over fp16 weights (on CUDA)",
    ),
    replace(BROKEN, arm="patched", variant="001", weights="fp32", says="weights and adapters in fp32, fp16=False, bf16=False"),
    replace(BROKEN, arm="patched", variant="002", patch="002", says='max_grad_norm=1.0 and label_names=["labels"] written out'),
    replace(BROKEN, arm="guarded", protect=True, heal=True, says="broken, under nanproof with healing on"),
)
FIXED = Setting(
    arm="fixed",
    says="fp32 weights, autocast where the device has bf16, a learning rate that suits LoRA, guarded",
    weights="fp32",
    precision="auto",
    optim="adamw_torch_fused",
    protect=True,
    lr=4e-3,
    batch=8,
    gradient_checkpointing=False,
)
GUARDED = next(s for s in REPORTED if s.arm == "guarded")
TUNED = replace(
    GUARDED,
    variant="tuned",
    lr=FIXED.lr,
    batch=FIXED.batch,
    gradient_checkpointing=FIXED.gradient_checkpointing,
    says="guarded, with the learning rate and batch of fixed",
)
AS_REPORTED = replace(
    FIXED,
    variant="reported",
    lr=BROKEN.lr,
    batch=BROKEN.batch,
    gradient_checkpointing=BROKEN.gradient_checkpointing,
    says="fixed, with the reported learning rate and batch",
)
RFT = replace(
    FIXED,
    arm="rft",
    start="fixed",
    lr=2e-3,
    batch=16,
    epochs=2,
    says="trained on from fixed, with its own right answers to new questions",
)
SETTINGS: dict[tuple[str, str], Setting] = {(s.arm, s.variant): s for s in (*REPORTED, TUNED, AS_REPORTED, FIXED)}


def setting(arm: str, variant: str = "", **changes: Any) -> Setting:
    """Return the setting of an arm with some changes; a change that is None is ignored. `patched` without a variant is 000."""
    return changed(find(SETTINGS, arm, variant or ("000" if arm == "patched" else "")), **changes)


def changed(found: Setting, **changes: Any) -> Setting:
    """Return the setting with other values; a change that is None is ignored."""
    changes = given(changes)
    asked = changes.get("precision", "auto")
    check_choice("precision", asked, ("auto", "bf16", "fp16", "fp32"))
    if found.precision != "auto" and changes.pop("precision", "auto") != "auto":
        raise UsageError(
            f"--precision {asked}: what --arm {found.arm} is held in is what the arm is about. Choose it with --arm fixed"
        )
    check_above(changes, "lr")
    check_least(changes, batch=1, epochs=1, warmup=0, rank=1, alpha=1)
    check_seed(changes.get("seed", 0))
    check_choice("form", changes.get("form", FORMS[0]), FORMS)
    return replace(found, **changes)
