"""What the comparison was to show: each claim with what was measured of it. Every one of them can fail.

Rewards are means over held-out scenes, sampled, so that they differ by chance. How far they have to be apart is said here, in
numbers, and in the claim.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from nanproof_recipes.comparison.comparison import Check
from nanproof_recipes.results import few
from nanproof_recipes.vlm_grpo.results import Result

CLEAR = 0.10
"""So much more reward, of 2, is clearly more; on few scenes it takes three standard errors, which is more than this."""
SPREAD = 0.45
"""The deviation of the reward from one scene to the next, for standard errors."""
CHANCE = 0.05
"""So near to the reward of replies that know nothing is at chance."""
SAME = 0.005
"""Rewards of one and the same model are this near: kernels may differ in a last digit, and so in a token."""
REPORTED = "probability tensor contains either `inf`, `nan` or element < 0"
"""What torch says when it is to sample from probabilities that are none."""
ON_CUDA = "device-side assert triggered"
"""What it says of that on CUDA, where the check is an assertion in the kernel."""
_SEEN = re.compile(r"its callback found (\d+) gradients")


def checks(by_name: Mapping[str, Result]) -> Iterable[Check]:
    """Claims about the arms that are there."""
    warm = by_name.get("warm")
    for name in ("broken", "broken-group"):
        if name in by_name:
            yield _died(by_name[name])
    if "patched" in by_name:
        yield from _patched(by_name["patched"], warm)
    guarded, fixed = seeds_of(by_name, "guarded"), seeds_of(by_name, "fixed")
    if guarded:
        yield from _guarded(guarded)
        if warm is not None:
            yield _learned("guarded", guarded, warm)
    if "guarded-group" in by_name:
        yield from _guarded_group(by_name["guarded-group"], warm)
    if fixed:
        yield _undisturbed(fixed)
        if warm is not None:
            yield _learned("fixed", fixed, warm)
    if guarded and fixed:
        yield _near(guarded, fixed)


def seeds_of(by_name: Mapping[str, Result], arm: str) -> list[Result]:
    """An arm and its further seeds; a variant is not one."""
    return [r for name, r in by_name.items() if name == arm or name.startswith(f"{arm}-seed-")]


def clearly(scenes: int) -> float:
    """The difference of two rewards, each over so many scenes, that is more than chance."""
    return max(CLEAR, 3 * SPREAD * math.sqrt(2 / max(1, scenes)))


def _died(r: Result) -> Check:
    return Check(
        f"{r.name}: dies while sampling, as reported, after a step whose loss was NaN; every adapter is NaN",
        f"{r.ending}; {_nan(r)}",
        r.ending.startswith("raised ")
        and (REPORTED in r.ending or ON_CUDA in r.ending)
        and r.nonfinite_steps > 0
        and _all_nan(r),
    )


def _patched(r: Result, warm: Result | None) -> Iterable[Check]:
    yield Check(
        "patched: does not die; rows of NaN are sampled from as if they were numbers, and every step is NaN, or all but one",
        f"{r.ending}; {_nan(r)}, {r.bad_rows or 0} rows of logits replaced",
        r.ending == "finished"
        and (r.bad_rows or 0) > 0
        and r.nonfinite_steps > 1
        and r.nonfinite_steps >= r.steps - 1
        and _all_nan(r),
    )
    if r.setting.get("trainer") == "trl":
        seen = next((int(found[1]) for note in r.notes if (found := _SEEN.search(note)) is not None), None)
        yield Check(
            "patched: its callback has no gradient to look at",
            "its callback says nothing" if seen is None else f"{seen} gradients in {r.steps} steps",
            seen == 0,
        )
    if warm is not None:
        known = None not in (r.reward, warm.reward, warm.chance)
        yield Check(
            f"patched: its reward is at chance, within {CHANCE}, and below the warm start",
            f"{few(r.reward)}; replies that know nothing {few(warm.chance)}, the warm start {few(warm.reward)}",
            known and (r.reward or 0.0) <= (warm.chance or 0.0) + CHANCE and (r.reward or 0.0) < (warm.reward or 0.0),
        )


def _guarded(runs: Sequence[Result]) -> Iterable[Check]:
    yield Check(
        "guarded: every seed finishes, and no adapter is NaN",
        _each(runs, lambda r: f"{r.ending}, {_nan(r)}"),
        all(r.ending == "finished" and r.nonfinite == 0 for r in runs),
    )
    yield Check(
        "guarded: one incident, which names the cause, exp-overflow; its fix is verified",
        _each(runs, lambda r: f"{len(r.incidents)}: {', '.join(_causes(r)) or 'no cause'}"),
        all(len(r.incidents) == 1 and _causes(r) == ["exp-overflow, verified"] for r in runs),
    )


def _guarded_group(r: Result, warm: Result | None) -> Iterable[Check]:
    yield Check(
        "guarded-group: finishes, and no adapter is NaN",
        f"{r.ending}, {_nan(r)}",
        r.ending == "finished" and r.nonfinite == 0,
    )
    yield Check(
        "guarded-group: names both causes, std-of-one-sample and, once that is healed, zero-advantage; both are verified",
        ", then ".join(_causes(r)) or "no cause",
        _causes(r) == ["std-of-one-sample, verified", "zero-advantage, verified"],
    )
    if warm is not None:
        known = r.reward is not None and warm.reward is not None
        yield Check(
            f"guarded-group: its reward is that of the warm start, within {SAME}: groups of one teach nothing",
            f"{few(r.reward)} and {few(warm.reward)}",
            known and abs((r.reward or 0.0) - (warm.reward or 0.0)) <= SAME,
        )


def _undisturbed(runs: Sequence[Result]) -> Check:
    return Check(
        "fixed: every seed finishes without an incident, and no adapter is NaN",
        _each(runs, lambda r: f"{r.ending}, {len(r.incidents)} incidents, {_nan(r)}"),
        all(r.ending == "finished" and not r.incidents and r.nonfinite == 0 and r.nonfinite_steps == 0 for r in runs),
    )


def _learned(arm: str, runs: Sequence[Result], warm: Result) -> Check:
    wanted = [clearly(min(r.scenes, warm.scenes)) for r in runs]
    gains = [math.nan if r.reward is None or warm.reward is None else r.reward - warm.reward for r in runs]
    return Check(
        f"{arm}: with every seed the reward is clearly above the warm start: by {CLEAR:.2f} and by three standard errors",
        f"{_each(runs, lambda r: few(r.reward))}; the warm start {few(warm.reward)}, asked for {max(wanted):.3f} more",
        all(gain >= least for gain, least in zip(gains, wanted, strict=True)),
    )


def _near(guarded: Sequence[Result], fixed: Sequence[Result]) -> Check:
    """No further outside of what the seeds of fixed came to than those are apart, or than chance may bring them."""
    own, others = ([math.nan if r.reward is None else r.reward for r in runs] for runs in (guarded, fixed))
    low, high = min(others), max(others)
    room = max(high - low, clearly(min(r.scenes for r in (*guarded, *fixed))))
    return Check(
        f"guarded: as near to fixed as one seed of fixed to another, or within {CLEAR:.2f} or three standard errors",
        f"guarded {', '.join(map(few, own))}; fixed {', '.join(map(few, others))}; asked for {room:.3f}",
        all(low - room <= reward <= high + room for reward in own),
    )


def _causes(r: Result) -> list[str]:
    found = [incident.get("diagnosis") or {} for incident in r.incidents]
    return [f"{d.get('cause', 'no cause')}, {'verified' if d.get('verified') is True else 'not verified'}" for d in found]


def _all_nan(r: Result) -> bool:
    return bool(r.tensors) and r.nonfinite == r.tensors


def _nan(r: Result) -> str:
    return f"{r.nonfinite} of {r.tensors} adapters not finite, {r.nonfinite_steps} of {r.steps} steps with a NaN or Inf"


def _each(runs: Sequence[Result], say: Callable[[Result], str]) -> str:
    """What was measured of every seed; once where it is the same."""
    said = [say(r) for r in runs]
    return said[0] if len(set(said)) == 1 else "; ".join(f"{r.name} {one}" for r, one in zip(runs, said, strict=True))
