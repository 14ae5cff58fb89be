"""Diagnose: match a case against the catalogue, rank what fits, try the fixes on the replay, and say it in sentences.

A diagnosis is never a guess dressed as a fact: it says how sure it is and what else fits, "verified" means that the fix held on
the bad step itself, and where nothing fits it says `unknown` with what was seen.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from nanproof._errors import UsageError
from nanproof._records import Diagnosis
from nanproof.core.judge._optimizers import bare_optimizer
from nanproof.core.support._signals import shielded
from nanproof.core.support._tree import tensors_in
from nanproof.explain import causes as _causes  # noqa: F401  (fills the catalogue)
from nanproof.explain._case import Case, Prescription, Trial
from nanproof.explain._cause import Cause, Match
from nanproof.explain.locate._locate import guilty_sample
from nanproof.explain.locate._trace import source_line
from nanproof.explain.replay._rehearse import TakesTooLong
from nanproof.explain.replay._replay import CannotReplay, Deadline, Replay

log = logging.getLogger("nanproof")

UNLIKELY = 0.35
"""What a match is worth whose fix did not hold."""
TRIED = 4
"""Fixes that are tried at the most."""


def explain(case: Case) -> Diagnosis:
    """The diagnosis of a case. Does not raise: what goes wrong in here is said in the evidence."""
    troubles: list[str] = []
    ranked = _matches(case, troubles, costly=False)
    tried = _tried(ranked, troubles)
    if not any(t.held for t in tried):
        ranked += (more := _matches(case, troubles, costly=True))
        tried += _tried(more, troubles)
    if not tried:
        return _checked(_unknown(case, troubles), case)
    best = max(tried, key=lambda t: t.rank)
    match, cause, verified, sentence = best.match, best.cause, best.held, best.sentence
    case.remedies = best.remedies
    others = [t for t in tried if t.held and t is not best]
    evidence = [*match.evidence]
    if match.source and (text := source_line(match.source)):
        evidence.append(f"{match.source}: {text}")
    if sentence:
        evidence.append(sentence)
    evidence += [f"{t.cause.slug} is possible too, but less specific: {t.sentence}" for t in others]
    samples = match.samples if match.samples is not None else ()
    if not samples and match.samples is not None and _worth_searching(case, match):
        samples = _search(case, troubles)
    return _checked(
        Diagnosis(
            cause=cause.slug,
            confidence=round(min(0.99, match.confidence if verified else match.confidence * (0.8 if match.trial else 1.0)), 2),
            phase=match.phase,
            where=match.where,
            op=match.op,
            source=match.source,
            samples=samples,
            tokens=match.tokens,
            evidence=(*evidence, *_context(case), *troubles),
            fix=match.fix or cause.fix,
            verified=verified,
            alternatives=tuple(
                dict.fromkeys(c.slug for c in (*(t.cause for t in others), *(c for _, c in ranked)) if c is not cause)
            ),
        ),
        case,
    )


def outcomes(case: Case) -> dict[str, Trial | None]:
    """Run the trial of every cause that matches the case, not only of those that could still win.

    Return the trials by slug, surest cause first; None where a match has no trial.
    """
    ranked = [pair for costly in (False, True) for pair in _matches(case, [], costly=costly)]
    found: dict[str, Trial | None] = {}
    for match, cause in ranked:
        try:
            found[cause.slug] = None if match.trial is None else match.trial()
        except Exception as error:
            found[cause.slug] = Trial(False, f"{type(error).__name__}: {error}"[:200])
    return found


@dataclass(frozen=True, slots=True)
class _Tried:
    """A match, and what became of its fix."""

    match: Match
    cause: Cause
    held: bool
    sentence: str
    remedies: tuple[Prescription, ...] = ()
    untried: bool = False
    """There was no time for its trial."""

    @property
    def rank(self) -> tuple[int, float]:
        """Of the fixes that held, that of the most specific cause; then how well the evidence fits."""
        if self.held:
            return 1 + self.cause.specific, self.match.confidence
        return 0, self.match.confidence * (1.0 if self.match.trial is None or self.untried else UNLIKELY)


def _matches(case: Case, troubles: list[str], costly: bool) -> list[tuple[Match, Cause]]:
    """What fits, surest first. Costly causes are asked only where no fix of the others held."""
    found: list[tuple[Match, Cause]] = []
    for cause in Cause.catalogue:
        if cause.costly != costly:
            continue
        try:
            match = cause.match(case)
        except CannotReplay as why:
            _note(troubles, why)
            continue
        except Exception as error:
            log.debug("nanproof: %s could not be matched", cause.slug, exc_info=True)
            troubles.append(f"looking for {cause.slug} failed: {type(error).__name__}: {error}"[:200])
            continue
        if match is not None:
            found.append((match, cause))
    return sorted(found, key=lambda pair: -pair[0].confidence)


def _note(troubles: list[str], why: CannotReplay) -> None:
    if str(why) not in troubles:
        troubles.append(str(why))


def _tried(ranked: list[tuple[Match, Cause]], troubles: list[str]) -> list[_Tried]:
    """Try the fixes in turn. Once one holds, only causes at least as specific could still win."""
    done: list[_Tried] = []
    for i, (match, cause) in enumerate(ranked):
        least = max((t.cause.specific for t in done if t.held), default=0)
        due = i < TRIED and match.trial is not None and cause.specific >= least
        done.append(_try(match, cause, troubles) if due else _Tried(match, cause, False, ""))
    return done


def _try(match: Match, cause: Cause, troubles: list[str]) -> _Tried:
    assert match.trial is not None
    try:
        trial = match.trial()
    except TakesTooLong as why:
        return _Tried(match, cause, False, f"not tried on {match.on} with {match.tried}: {why}", untried=True)
    except CannotReplay as why:
        _note(troubles, why)
        return _Tried(match, cause, False, "")
    except Exception as error:
        log.debug("nanproof: a fix could not be tried", exc_info=True)
        troubles.append(f"the fix could not be tried: {type(error).__name__}: {error}"[:200])
        return _Tried(match, cause, False, "")
    outcome = "it holds" if trial.held else "it does not help"
    said = f"tried on {match.on} with {match.tried}, {outcome}: {trial.result}"
    return _Tried(match, cause, trial.held, said, trial.remedies if trial.held else ())


def _worth_searching(case: Case, match: Match) -> bool:
    return match.phase in ("forward", "loss", "backward") and case.nonfinite and case.replay is not None


def _search(case: Case, troubles: list[str]) -> tuple[int, ...]:
    """The sample, by putting healthy ones in the place of the others."""
    assert case.replay is not None
    try:
        return guilty_sample(case.replay, [m.batches[0] for m in reversed(list(case.moments)) if len(m.batches) == 1])
    except CannotReplay:
        return ()
    except Exception as error:
        troubles.append(f"the sample could not be searched for: {type(error).__name__}: {error}"[:200])
        return ()


def _unknown(case: Case, troubles: list[str]) -> Diagnosis:
    evidence: list[str] = []
    fix = "No fix is known."
    if case.replay is None and case.nonfinite:
        why = case.details.get("why_not_again", "the step cannot be run again here; nanproof.diagnose(...) can say more")
        called = "the model was called with finite numbers only"
        tensors = (t for call in case.calls for _, t in tensors_in((call["args"], call["kwargs"])))
        looked = any(t.is_floating_point() for t in tensors) and not case.bad_inputs
        evidence += [why] + [called] * looked
        fix = f"Not explained: {called + ', and ' if looked else ''}{why}."
    where = op = source = None
    samples: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    phase = "unknown"
    try:
        birth = None
        # A step that is only suspected is not run again: a healthy run may look the same.
        if case.signal in ("", "zero-gradients") and case.control is not None:
            evidence.append(f"run again: {case.control}")
            birth = case.birth
        if birth is not None:
            where, op, source = birth.op.path, birth.op.name.strip("_"), birth.op.source or None
            phase = "backward" if birth.in_backward else "forward"
            samples, tokens = birth.samples, birth.tokens
            ranges = ", ".join(f"{i.range.low:.4g} to {i.range.high:.4g}" for i in birth.at.inputs[:3])
            evidence.append(f"born in {op} of {where}{birth.place()}, from inputs in {ranges or 'no tensor'}")
            if source and (text := source_line(source)):
                evidence.append(f"{source}: {text}")
    except CannotReplay as why:
        _note(troubles, why)
    except Exception as error:
        troubles.append(f"the operation could not be located: {type(error).__name__}: {error}"[:200])
    return Diagnosis(
        cause="unknown",
        confidence=0.0,
        phase=phase,
        where=where,
        op=op,
        source=source,
        samples=samples,
        tokens=tokens,
        evidence=(*evidence, *_context(case), *troubles),
        fix=fix,
        verified=False,
    )


def _context(case: Case) -> list[str]:
    said = []
    if case.replay is not None and case.replay.compiled:
        said.append("the model is compiled; the replay ran eagerly")
    then, now = case.record, case.__dict__.get("_surveyed")
    comparable = case.nonfinite and then is not None and now is not None and not case.details.get("part")
    if comparable and then is not None and now is not None:
        before, again = then.loss, now[1].loss
        if math.isfinite(before) and math.isfinite(again) and not math.isclose(before, again, rel_tol=1e-4, abs_tol=1e-9):
            said.append(f"the replay's loss is {again:.6g}, the step's was {before:.6g}: the step keeps a state of its own")
    said += case.details.get("notes", ())
    return said


_NOT_OF_THE_SCALE = (
    "nonfinite-batch",
    "nonfinite-weights-at-start",
    "nonfinite-weights-mid-run",
    "transient-fault",
    "gradients-not-cleared",
    "learning-rate-too-high",
)


def _checked(diagnosis: Diagnosis, case: Case) -> Diagnosis:
    """A finite loss whose backward is bad at any loss scale is what makes a GradScaler collapse."""
    if case.kind != "loss-scale-collapse" or diagnosis.cause in _NOT_OF_THE_SCALE:
        return diagnosis
    said = "the gradients are non-finite at a loss scale of 1 as well: no scale helps, and GradScaler would halve it for ever"
    return replace(
        diagnosis,
        cause="loss-scale-collapse",
        confidence=max(diagnosis.confidence, 0.8),
        evidence=(f"{said}. The cause under it: {diagnosis.cause}", *diagnosis.evidence),
        fix=f"It is no range problem: find the operation. {diagnosis.fix}",
        alternatives=(diagnosis.cause, *diagnosis.alternatives),
    )


@shielded
def diagnose(
    model: nn.Module,
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    healthy: Any = (),
    seconds: float = 60.0,
) -> Diagnosis:
    """What is wrong with one batch in hand: run it, locate the birth of the trouble, name the cause, try the fix.

    Args:
        model: the module, with the weights the batch fails on. It is left as it was, random numbers included.
        loss_fn: `loss_fn(model, batch)` returns the scalar loss.
        batch: the bad batch.
        optimizer: if given, its settings are looked at too; a list where there are several.
        healthy: other batches of the same shape, used to single out the bad sample.
        seconds: how long it may take.

    A batch with which nothing is wrong gives a diagnosis whose cause is "none".
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"diagnose(model=...): a torch.nn.Module is needed, not {type(model).__name__}")
    if not callable(loss_fn):
        raise UsageError("diagnose(loss_fn=...): a function loss_fn(model, batch) is needed")
    from nanproof.explain.replay._recorder import Recorder

    replay = Replay(model, loss_fn, [batch], deadline=Deadline.after(seconds))
    recorder = Recorder()
    for i, other in enumerate(healthy):
        recorder.keep(-1 - i, (other,), replay.random, replay.mode)
    used = None if optimizer is None else bare_optimizer(optimizer)
    case = Case("nonfinite-loss", replay=replay, optimizer=used, moments=list(recorder))
    control = case.control
    assert control is not None
    if control.finite:
        return Diagnosis(cause="none", confidence=1.0, evidence=(f"the step is finite: {control}",), fix="", verified=False)
    if control.error is not None:
        case.kind, case.error = "exception", control.error
    elif math.isfinite(control.loss):
        case.kind = "nonfinite-gradient" if not control.gradients_finite else "gradient-norm-overflow"
    return explain(case)
