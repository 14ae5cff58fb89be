"""Run every arm of vlm-grpo and put them into one table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanproof_recipes.comparing import GRAD_NORM, NONFINITE, REFUSED, SKIPPED, around, row
from nanproof_recipes.comparison.comparison import Arm, Column, Comparison
from nanproof_recipes.machine import device
from nanproof_recipes.results import FILE, few
from nanproof_recipes.vlm_grpo.apart import train_apart
from nanproof_recipes.vlm_grpo.arms import FIXED, GUARDED, SETTINGS, WARM, Setting, changed
from nanproof_recipes.vlm_grpo.claims import checks
from nanproof_recipes.vlm_grpo.results import Result
from nanproof_recipes.vlm_grpo.running import Workshop

COLUMNS = (
    Column(
        "reward", "reward", note="Caption and place, of 2: sampled replies to held-out scenes. A dash: it cannot be sampled from."
    ),
    Column("caption", "caption", note="F1 of the words that describe the region."),
    Column(
        "place",
        "place",
        note="How well the place meets the mask: IoU of a box, or how much of a point's cell it covers, 1 for the best cell.",
    ),
    Column(
        "reward_std",
        "reward_std",
        note="Deviation of the reward, over the last steps: TRL logs that of all replies of a step, the recipe's own loop the "
        "mean of those within its groups.",
    ),
    Column("kl", "KL", note="k3 estimate of the divergence from the reference, over the last steps, as it was logged."),
    Column("entropy", "entropy", note="Of the next token in nats, over the last steps."),
    Column("loss", "logged loss", note="The last that was logged. TRL's Trainer shows a NaN as 0."),
    GRAD_NORM,
    Column("nonfinite_steps", "NaN/Inf steps", "count", note="Steps whose logged loss or grad_norm was NaN or Inf."),
    Column(
        "bad_rows",
        "bad logits",
        "count",
        note="Rows of logits with a NaN or Inf while replies were sampled. Under nanproof a reply ends with the first of them.",
    ),
    NONFINITE,
    REFUSED,
    SKIPPED,
    Column(
        "rolled_back",
        "rolled back",
        "count",
        note="Times that the run went back to a checkpoint; a step that was only run again is among the refused.",
    ),
    Column("seconds", "seconds", "seconds", note="Training alone; several arms at a time take longer each."),
)
LEAD = (
    "A small vision-language model describes a marked region and says where it is. After a warm start on right answers it is "
    "trained by GRPO, and as reported it died while sampling: probability tensor contains either inf, nan or element < 0. Two "
    "causes are shown: a token that does not count in the loss, and whose log-ratio overflows in exp before it is masked; and "
    "groups of one reply, whose deviation is NaN. Each is run as it was reported and under nanproof, the first also as a "
    "document patched it, and beside them the right setting. All begin with the same warm start, and are asked about the same "
    "held-out scenes."
)


def compare(workshop: Workshop, seeds: int = 2, changes: Mapping[str, Any] | None = None, jobs: int = 1) -> Comparison:
    """All arms, `guarded` and `fixed` with so many further seeds. `changes` are settings that every arm shares, such as steps;
    the seed is not one of them. Arms that are done are taken as they are; with `jobs` above 1 the others are trained by so many
    processes at a time."""
    settings = arms_of(seeds, changes or {})
    warm = workshop.warm()
    todo = [setting for setting in settings if not (workshop.out / setting.name / FILE).exists()]
    if jobs > 1:
        train_apart(workshop, todo, jobs)
    elif device().type == "cuda":
        train_apart(workshop, [setting for setting in todo if setting.may_lose_device], 1)
    return told(workshop, [warm, *(workshop.arm(setting) for setting in settings)])


def arms_of(seeds: int, changes: Mapping[str, Any]) -> list[Setting]:
    """In the order of the table."""
    arms = [_changed(setting, changes) for setting in SETTINGS.values()]
    more = [_changed(setting, changes) for setting in (GUARDED, FIXED)]
    return arms + [replace(setting, seed=seed) for setting in more for seed in range(1, seeds + 1)]


def _changed(setting: Setting, changes: Mapping[str, Any]) -> Setting:
    """Groups of one stay groups of one, in batches that are no larger than their own."""
    own = {key: value for key, value in changes.items() if value is not None}
    if setting.variant == "group":
        own.pop("group", None)
        own["batch"] = min(own.get("batch", setting.batch), setting.batch)
    return changed(setting, **own)


def told(workshop: Workshop, results: Iterable[Result]) -> Comparison:
    """The comparison of results that are there."""
    results = list(results)
    return Comparison(
        recipe="vlm-grpo",
        title="vlm-grpo: the reinforcement learning that died while sampling",
        lead=LEAD,
        columns=COLUMNS,
        arms=tuple(_arm(workshop.out, result) for result in results),
        checks=tuple(checks({result.name: result for result in results})),
        **around(results, device()),
    )


def _arm(out: Path, r: Result) -> Arm:
    by_chance = [f"Replies that know nothing come to a reward of {few(r.chance)}."] if r.chance is not None else []
    likeliest = [f"Its likeliest replies come to a reward of {few(r.greedy)}."] if r.greedy is not None else []
    curves = dict(r.curves) if r.tensors is not None else {}  # that of the warm start is another loss
    return row(out, r, _says(r), COLUMNS, story=(*by_chance, *likeliest, *r.notes), curves=curves)


def _says(r: Result) -> str:
    if r.name == WARM:
        return f"the warm start: {r.steps} steps on right answers. Every arm begins with it"
    known = SETTINGS.get((str(r.setting.get("arm")), str(r.setting.get("variant", ""))))
    seed = r.setting.get("seed")
    if known is None:
        return "unknown"
    return f"{known.name}, with seed {seed}" if seed else known.says
