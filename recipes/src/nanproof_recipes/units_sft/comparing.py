"""Run every arm of units-sft, put them into one table, and check each claim against what was measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from nanproof_recipes.comparing import GRAD_NORM, NONFINITE, REFUSED, ROLLED_BACK, SKIPPED, around, row
from nanproof_recipes.comparison.comparison import Arm, Check, Column, Comparison
from nanproof_recipes.machine import device, reproducible
from nanproof_recipes.units_sft.arms import AS_REPORTED, FIXED, REPORTED, RFT, SETTINGS, TUNED, Setting, changed
from nanproof_recipes.units_sft.models import REAL
from nanproof_recipes.units_sft.rejection import Kept, Sampling, new_questions, rows_of, sample
from nanproof_recipes.units_sft.results import Result
from nanproof_recipes.units_sft.workshop import Workshop
from nanproof_recipes.weights import checksum

NEAR = 0.05
"""How far the accuracy of a healed run may be from one that was right from the beginning."""
COLUMNS = (
    Column("loss", "logged loss", note="The last that the Trainer logged. It shows a NaN as 0."),
    Column("valid_loss", "held-out loss", note="Measured after training, on answers that were not trained on."),
    GRAD_NORM,
    Column("accuracy", "accuracy", "share", note="Within 5 % of the correct value, of all held-out questions."),
    Column("answer_rate", "answer rate", "share", note="Replies that parse to a number."),
    NONFINITE,
    REFUSED,
    SKIPPED,
    ROLLED_BACK,
    Column("seconds", "seconds", "seconds", note="Training alone."),
)
LEAD = (
    "A small language model is to learn unit conversion with LoRA. As reported it ended with grad_norm nan and an accuracy of 0. "
    "Three documents each named a cause and a fix; they are run here as they were written, beside the same setting under "
    "nanproof and beside the right one. What else differs is said with each arm."
)


def rft(workshop: Workshop, setting: Setting = RFT, sampling: Sampling | None = None, again: bool = False) -> Result:
    """Sample from the model of `fixed`, keep what is right, and train on from it with that."""
    sampling = sampling if sampling is not None else Sampling()
    start = checksum(workshop.adapters(setting.start) / "adapter_model.safetensors")  # where there is none, nothing is begun
    told = {**asdict(sampling), "from": start[:16]}
    done = workshop.done(setting, again=again, sampling=told)
    if done is not None:
        return done
    kept = _kept(workshop, setting, sampling, workshop.begin(setting, sampling=told) / "kept.jsonl")
    workshop.progress.say(f"  {kept}")
    if not kept.pairs:
        return Result(name=setting.name, setting={}, ending=f"not trained: {kept}")
    rows = rows_of(workshop.language, workshop.sets["train"], kept, setting)
    return workshop.arm(setting, rows=rows, notes=(str(kept),), sampling=told)


def _kept(workshop: Workshop, setting: Setting, sampling: Sampling, path: Path) -> Kept:
    """Drawn once, and kept in the folder: training that was stopped goes on with the same answers."""
    if path.exists():
        return Kept.load(path)
    asked = new_questions(sampling.more, [*workshop.sets["train"], *workshop.sets["valid"]], setting.seed)
    at_once = max(1, 2 * workshop.ask_at_once // sampling.samples)
    language = workshop.load(setting.start)
    with reproducible(), workshop.progress.of(f"sample {setting.start}", len(asked)) as advance:
        kept = sample(language, asked, sampling, seed=setting.seed, batch=at_once, tick=advance)
    kept.save(path)
    return kept


def compare(workshop: Workshop, changes: Mapping[str, Any], sampling: Sampling, *, with_rft: bool = True) -> Comparison:
    """All arms. `changes` are settings that every arm shares: epochs, rank, seed, form; the learning rate is the arm's own."""
    settings = [changed(setting, **changes) for setting in (*REPORTED, AS_REPORTED, TUNED, FIXED)]
    results = [workshop.unmodified(), workshop.unmodified(shots=3), *(workshop.arm(setting) for setting in settings)]
    if with_rft:
        results.append(rft(workshop, changed(RFT, **changes), sampling))
    return told(workshop, results)


def told(workshop: Workshop, results: Iterable[Result]) -> Comparison:
    """The comparison of results that are there."""
    results = list(results)
    return Comparison(
        recipe="units-sft",
        title="units-sft: the fine-tuning that learned nothing",
        lead=LEAD,
        columns=COLUMNS,
        arms=tuple(_arm(workshop.out, result) for result in results),
        checks=tuple(checks({result.name: result for result in results}, real=workshop.model_name == REAL)),
        **around(results, device()),
    )


def _arm(out: Path, result: Result) -> Arm:
    known = {setting.name: setting.says for setting in (*SETTINGS.values(), RFT)}
    unmodified = "the model as it was loaded" + (", after three worked questions" if "shot" in result.name else "")
    found = row(out, result, known.get(result.name, unmodified), COLUMNS)
    return found if result.questions else replace(found, values={**found.values, "accuracy": None, "answer_rate": None})


# -- what it was to show -------------------------------------------------------------------------------------------------------


def checks(by_name: Mapping[str, Result], real: bool) -> Iterable[Check]:
    """Each claim with what was measured. How well a model answers is claimed of the real one alone: a tiny one never does."""
    yield from _failures(by_name)
    yield from _healing(by_name, real)
    if real:
        yield from _second_cause(by_name)
    if real and "fixed" in by_name:
        fixed = by_name["fixed"]
        measured = f"accuracy {fixed.accuracy:.3f}, answer rate {fixed.answer_rate:.3f} on {fixed.questions} questions"
        yield Check(
            "fixed: accuracy of at least 0.60 and answer rate of at least 0.95",
            measured,
            fixed.accuracy >= 0.60 and fixed.answer_rate >= 0.95,
        )
        if "rft" in by_name:
            better = by_name["rft"]
            yield Check(
                "rft is above fixed",
                f"accuracy {better.accuracy:.3f} after {fixed.accuracy:.3f}",
                better.accuracy > fixed.accuracy,
            )


def _failures(by_name: Mapping[str, Result]) -> Iterable[Check]:
    for name in ("broken", "patched-002"):
        if name in by_name:
            r = by_name[name]
            lost = r.grad_norm is not None and not math.isfinite(r.grad_norm) and r.nonfinite == r.tensors
            yield Check(f"{name}: grad_norm nan, every adapter NaN, accuracy 0", _said(r), lost and r.accuracy == 0)
    if "broken" in by_name and "patched-002" in by_name:
        logs = [str({k: list(v) for k, v in by_name[name].curves.items()}) for name in ("broken", "patched-002")]
        lines = len(by_name["broken"].curves.get("loss", ()))
        yield Check(
            "patched-002: its log is that of broken, to the last digit", f"{lines} lines", logs[0] == logs[1] and lines > 0
        )
    if "patched-000" in by_name:
        r = by_name["patched-000"]
        passes = any(note.endswith(" names pass after the first step") for note in r.notes)
        hidden = passes and r.nonfinite == r.tensors and r.accuracy == 0
        yield Check("patched-000: passes its own checks of the log and has learned nothing", _said(r), hidden)
    if "patched-001" in by_name:
        r = by_name["patched-001"]
        yield Check("patched-001: fp32 weights train", f"{_fall(r)}; {_said(r)}", _learned(r))


def _second_cause(by_name: Mapping[str, Result]) -> Iterable[Check]:
    if "broken-prompt" in by_name and "patched-001" in by_name:
        r, other = by_name["broken-prompt"], by_name["patched-001"]
        yield Check(
            "broken-prompt: learns, and has an answer rate of 0 where patched-001 has one above 0.9",
            f"{_fall(r)}; answer rates {r.answer_rate:.3f} and {other.answer_rate:.3f}",
            _learned(r) and r.answer_rate == 0 and other.answer_rate > 0.9,
        )


def _learned(r: Result) -> bool:
    """Every weight is finite, and the loss has come down."""
    losses = [x for x in r.curves.get("loss", ()) if x is not None]
    return r.nonfinite == 0 and len(losses) > 1 and math.isfinite(r.valid_loss or math.nan) and losses[-1] < losses[0]


def _fall(r: Result) -> str:
    losses = [x for x in r.curves.get("loss", ()) if x is not None]
    return f"loss {losses[0]:.3g} to {losses[-1]:.3g}" if losses else "no loss was logged"


def _healing(by_name: Mapping[str, Result], real: bool) -> Iterable[Check]:
    for name, twin in (("guarded", "fixed-reported"), ("guarded-tuned", "fixed")):
        if name not in by_name or twin not in by_name:
            continue
        r, other = by_name[name], by_name[twin]
        healed = [i for i in r.incidents if i.get("remedy") is not None]
        found = [i["diagnosis"]["cause"] for i in healed if i["diagnosis"] and i["diagnosis"]["verified"]]
        yield Check(
            f"{name}: names the cause, verifies the fix and applies it; no NaN in the weights",
            f"{', '.join(dict.fromkeys(found)) or 'no cause'}; {_said(r)}",
            bool(found) and r.nonfinite == 0,
        )
        losses = r.valid_loss or math.nan, other.valid_loss or math.nan
        yield Check(
            f"{name}: held-out loss within 5 % of {twin}",
            f"{losses[0]:.4g} and {losses[1]:.4g}",
            abs(losses[0] - losses[1]) <= 0.05 * losses[1],
        )
        if real:
            yield Check(
                f"{name}: accuracy within {NEAR} of {twin}",
                f"{r.accuracy:.3f} and {other.accuracy:.3f}",
                abs(r.accuracy - other.accuracy) <= NEAR,
            )


def _said(r: Result) -> str:
    norm = "none" if r.grad_norm is None else f"{r.grad_norm:.3g}"
    return (
        f"grad_norm {norm}, {r.nonfinite} of {r.tensors} adapters not finite, accuracy {r.accuracy:.3f}, "
        f"answer rate {r.answer_rate:.3f}"
    )
