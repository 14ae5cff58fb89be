"""Run every arm of latent-dlm, put them into one table, and check each claim against what was measured."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from nanproof_recipes.comparing import GRAD_NORM, ROLLED_BACK, SKIPPED, around, row
from nanproof_recipes.comparison.comparison import Check, Column, Comparison
from nanproof_recipes.latent_dlm.arms import SETTINGS, setting
from nanproof_recipes.latent_dlm.results import Result
from nanproof_recipes.latent_dlm.running import Studio
from nanproof_recipes.library import decode
from nanproof_recipes.results import few

FAR = 1.5
"""So many times the latent loss of fixed is far above it."""
NEAR = 0.02
"""Seeds of fixed that happen to come closer to each other than this share of their loss do not make it a narrower claim."""
_MET = re.compile(r"the latent of sample (\d+) is damaged; it is met at step (\d+)")
COLUMNS = (
    Column("text_loss", "text loss", note="Cross entropy of masked bytes in nats, on held-out windows at the end."),
    Column("latent_loss", "latent loss", note="Squared error of what is predicted of held-out latents, never normalised."),
    Column("text_accuracy", "masked accuracy", "share", note="Masked bytes whose likeliest value is the right one."),
    GRAD_NORM,
    SKIPPED,
    ROLLED_BACK,
    Column("nonfinite", "NaN parameters", "text", note="Parameters that are not finite at the end, of all."),
    Column("seconds", "seconds", "seconds", note="Training, with its evaluations and checkpoints."),
)
LEAD = (
    "A transformer with two streams learns text by unmasking it and latents by DDPM. As reported its latent loss became NaN and "
    "stayed NaN. Here the latent of one training sample is damaged: its numbers are finite, and their square is not. The "
    "training is run as it was reported, as a document patched it, as reported under nanproof, and as it should be, the last "
    "with several seeds. All arms are measured on the same held-out windows, with the same masks and the same noise."
)


def compare(studio: Studio, seeds: int = 2) -> Comparison:
    """All arms, and `fixed` with so many further seeds. Arms that are done are taken as they are."""
    first = studio.config.training.seed
    arms = [setting(name) for name in SETTINGS] + [setting("fixed", seed=first + more) for more in range(1, seeds + 1)]
    return told(studio.out, [studio.run(arm) for arm in arms], studio)


def told(out: Path, results: Sequence[Result], studio: Studio) -> Comparison:
    """The comparison of results that are there."""
    return Comparison(
        recipe="latent-dlm",
        title="latent-dlm: the diffusion language model that stayed NaN",
        lead=LEAD,
        columns=COLUMNS,
        arms=tuple(row(out, result, _says(result), COLUMNS) for result in results),
        checks=tuple(checks({result.name: result for result in results})),
        **around(results, studio.team.place),
    )


def _says(result: Result) -> str:
    seed = result.setting.get("seed")
    return SETTINGS[result.setting["arm"]].says if seed is None else f"fixed, with seed {seed}"


# -- what it was to show -------------------------------------------------------------------------------------------------------


def checks(by_name: Mapping[str, Result]) -> Iterable[Check]:
    """Each claim with what was measured."""
    yield from _broken(by_name["broken"])
    yield _patched(by_name["patched"], by_name["fixed"])
    yield from _guarded(by_name)
    fixed = by_name["fixed"]
    texts, latents = (_validated(fixed, name) for name in ("eval_text_loss", "eval_latent_loss"))
    yield Check(
        "fixed: text and latents are learned",
        f"held-out text loss {_fall(texts)}, latent loss {_fall(latents)}",
        fixed.nonfinite == 0 and all(len(found) > 1 and found[-1][1] < found[0][1] for found in (texts, latents)),
    )


def _broken(r: Result) -> Iterable[Check]:
    yield Check(
        "broken: a norm of Inf passes a check that looks for NaN, and no loss is finite from then on",
        f"norm inf first at step {_step(r.infinite)}, no finite loss from step {_step(r.lost)} on, {r.skipped} skipped",
        r.infinite is not None and r.lost is not None and r.lost <= r.infinite + 1 and r.skipped == 0,
    )
    yield Check(
        "broken: weights are NaN, and so is the latent loss",
        f"{r.nonfinite} of {r.tensors} parameters not finite, held-out latent loss {few(r.latent_loss)}",
        bool(r.nonfinite) and r.latent_loss is not None and math.isnan(r.latent_loss),
    )
    met = _damaged(r)[1]
    texts = _validated(r, "eval_text_loss")
    before, last = [found for found in texts if met is not None and found[0] <= met][-1:], texts[-1:]
    said = " and ".join(f"{loss:.4g} at step {step}" for step, loss in (*before, *last))
    yield Check(
        "broken: nothing is learned any more; the held-out text loss at the end is no better than before the damaged step",
        f"{said}; the damaged step is {met}" if before else f"not measured before step {_step(met)}",
        bool(before) and last != before and not last[0][1] < before[0][1],
    )


def _patched(r: Result, fixed: Result) -> Check:
    patched, right = r.latent_loss or math.nan, fixed.latent_loss or math.nan
    return Check(
        f"patched: lives, but its latent loss, measured without normalising, is more than {FAR} times that of fixed",
        f"{r.nonfinite} of {r.tensors} parameters not finite; {patched:.4g} and {right:.4g}, {patched / right:.2f} times",
        r.nonfinite == 0 and patched > FAR * right,
    )


def _guarded(by_name: Mapping[str, Result]) -> Iterable[Check]:
    r = by_name["guarded"]
    yield Check(
        "guarded: one step is refused, and no parameter is NaN",
        f"{r.skipped} skipped, {r.nonfinite} of {r.tensors} parameters not finite, {r.ending}",
        r.skipped == 1 and r.nonfinite == 0 and r.ending == "finished",
    )
    first = r.incidents[0] if len(r.incidents) == 1 else {}
    found, index = first.get("diagnosis") or {}, _damaged(r)[0]
    named = not math.isfinite(decode(first.get("terms", {}).get("latent_loss", 0.0)))
    sample = index is not None and index in first.get("quarantined", ())
    verified = found.get("cause") == "outlier-batch" and found.get("verified") is True
    yield Check(
        "guarded: the incident names the term, the damaged sample and the cause, and its fix is verified",
        f"{len(r.incidents)} incident; {'latent_loss' if named else 'no term'}, "
        f"{f'sample {index}' if sample else 'not the sample'}, {found.get('cause', 'no cause')}"
        f"{', verified' if found.get('verified') is True else ', not verified'}",
        named and sample and verified,
    )
    seeds = [result for name, result in by_name.items() if name.partition("-")[0] == "fixed"]
    if len(seeds) > 1:
        yield from (_near(r, seeds, name) for name in ("text_loss", "latent_loss"))


def _near(r: Result, seeds: Sequence[Result], name: str) -> Check:
    """No further outside of what the seeds of fixed came to than those are apart, or than NEAR."""
    own, others = getattr(r, name), [getattr(seed, name) for seed in seeds]
    low, high = min(others), max(others)
    room = max(high - low, NEAR * high)
    return Check(
        f"guarded: its {name.replace('_', ' ')} is as near to fixed as one seed of fixed to another, or within {NEAR:.0%}",
        f"{own:.4g}; {len(seeds)} seeds of fixed {low:.4g} to {high:.4g}",
        low - room <= own <= high + room,
    )


def _damaged(r: Result) -> tuple[int | None, int | None]:
    """The damaged sample and the step that met it, as the notes of the training say it."""
    for note in r.notes:
        found = _MET.search(note)
        if found is not None:
            return int(found[1]), int(found[2])
    return None, None


def _validated(r: Result, name: str) -> list[tuple[int, float]]:
    """Step and value wherever it was measured."""
    found = zip(r.curves.get("step", ()), r.curves.get(name, ()), strict=True)
    return [(int(step or 0), x) for step, x in found if x is not None]


def _fall(found: Sequence[tuple[int, float]]) -> str:
    return f"{found[0][1]:.4g} to {found[-1][1]:.4g}" if len(found) > 1 else "not measured on the way"


def _step(step: int | None) -> str:
    return "none" if step is None else str(step)
