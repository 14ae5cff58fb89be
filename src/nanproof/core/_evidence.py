"""From a refused step to its incident: what kind, which parameters, which micro-batch, which rank.
Runs on failure only."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nanproof import _wording as wording
from nanproof._records import Incident, StepRecord
from nanproof.core.judge._stats import Finding
from nanproof.core.judge._terms import rose_most
from nanproof.core.judge._verdict import Reading
from nanproof.core.support._ranks import Ranks

_NAMED = 8
"""Culprits an incident lists at the most."""
_GROWING = 100
"""Steps before a halt in which a divergence that began there counts as what led to it."""


@dataclass(frozen=True, slots=True)
class Witness:
    """What the ranks saw of a bad step, the same on every rank."""

    loss_bad: bool
    buffers_bad: bool
    weights_bad: bool
    rank: int | None
    micro_batch: int | None
    guilty: int
    """How many ranks were bad by themselves; 0 where that cannot be told."""

    @property
    def only_gradients(self) -> bool:
        """Loss, buffers and weights were fine: the trouble began in the gradients."""
        return not (self.loss_bad or self.buffers_bad or self.weights_bad)

    @classmethod
    def hear(
        cls, ranks: Ranks, reading: Reading, losses: Sequence[Tensor], probes: Sequence[Tensor], weights_bad: bool
    ) -> Witness:
        """Ask this rank, and the others where there are any. `losses` and `probes` hold one scalar
        a micro-batch."""
        mine = _first_bad(losses)
        loss_bad = mine is not None or not math.isfinite(reading.loss)
        if mine is None:
            mine = _first_bad(probes)
        backwards = max(len(losses), len(probes))
        micro = -1 if mine is None or backwards < 2 else mine
        guilty_here = mine is not None or loss_bad or reading.bad_buffer > 0
        said = ranks.gather([loss_bad, guilty_here, micro, reading.bad_buffer, weights_bad])
        guilty = [rank for rank, (_, bad, *_) in said.items() if bad]
        who = guilty[0] if guilty and ranks.together else None
        micro = int(said[guilty[0]][2]) if guilty else -1
        return cls(
            loss_bad=any(s[0] for s in said.values()),
            buffers_bad=any(s[3] for s in said.values()),
            weights_bad=any(s[4] for s in said.values()),
            rank=who,
            micro_batch=micro if micro >= 0 else None,
            guilty=len(guilty),
        )


@dataclass(frozen=True, slots=True)
class Gradients:
    """The gradients of a bad step, looked at: in place, or from a replay."""

    norms: list[tuple[str, float]] | None
    """By parameter; None where those of the step itself are to be used."""
    all_finite: bool
    """Every element is finite, even if a norm is not."""
    rank: int | None = None
    """The first rank on which a gradient went bad before any reduction; known from a replay
    only."""


def _first_bad(scalars: Sequence[Tensor]) -> int | None:
    if not scalars:
        return None
    finite = torch.isfinite(torch.stack([s.detach().float() for s in scalars])).tolist()
    return finite.index(False) if False in finite else None


def make_incident(
    step: int,
    reading: Reading,
    norms: list[tuple[str, float]],
    witness: Witness,
    gradients: Gradients | None,
    broken: list[str],
    *,
    settings: Sequence[str] = (),
    affected: int = 0,
    put_back: bool = False,
) -> Incident:
    """What happened, the earliest fault first: what is bad before a step makes all after it bad.

    Args:
        settings: settings of the optimizer that are non-finite, in words.
        affected: parameters that they apply to.
        put_back: weights and state are as they were before the step, so what is broken was so then.
    """
    norms = gradients.norms if gradients is not None and gradients.norms is not None else norms
    guilty = [(name, norm) for name, norm in norms if not math.isfinite(norm)]
    bad = [name for name, _ in guilty]
    # The squares of finite numbers add up to Inf at most.
    overflow = gradients is not None and gradients.all_finite and not any(math.isnan(norm) for _, norm in guilty)
    beside = wording.bad_settings(settings)
    if reading.weights_bad and not (put_back and witness.weights_bad):
        kind, seen = "nonfinite-weight", wording.BROKE_IN_THE_STEP
    elif witness.weights_bad:
        kind, seen = "nonfinite-weight", wording.broken_before(broken)
    elif witness.loss_bad:
        kind, seen = "nonfinite-loss", wording.bad_loss(reading.loss, bad, len(norms))
    elif witness.buffers_bad:
        kind, seen = "nonfinite-weight", wording.bad_buffers(broken)
    elif math.isfinite(reading.total) and reading.bad_setting:
        kind, seen, beside = "nonfinite-weight", wording.would_have_broken(settings, affected), ""
    elif math.isfinite(reading.total):
        kind, seen = "spike", wording.spike(reading.loss, reading.total)
        guilty = list(largest(norms))
    elif overflow or not guilty:
        kind, seen = "gradient-norm-overflow", wording.NORM_OVERFLOW
    else:
        kind, seen = "nonfinite-gradient", wording.bad_gradients_of_a_finite_loss(reading.loss, bad, len(norms))
    rank = witness.rank if witness.rank is not None or gradients is None else gradients.rank
    return Incident(
        step=step,
        kind=kind,
        action="skipped",
        loss=reading.loss,
        grad_norm=reading.total,
        culprits=tuple(guilty[:_NAMED]),
        rank=rank,
        micro_batch=witness.micro_batch,
        message=wording.located("; ".join(filter(None, (seen, beside))), witness.micro_batch, rank),
    )


def from_finding(finding: Finding, history: Iterable[StepRecord] = ()) -> Incident:
    """The incident of a spike that turned out to be something. `history`: records, oldest first."""
    seen, before = finding.record, None
    for record in history:
        if record.step < seen.step and record.action != "skipped":
            before = record
    rose = rose_most(before.terms, seen.terms) if before is not None else ""
    return Incident(
        step=seen.step,
        kind=finding.kind,
        action="clipped" if seen.action == "clipped" else "recorded",
        loss=seen.loss,
        grad_norm=seen.grad_norm,
        culprits=largest(seen.by_parameter.items()),
        terms=seen.terms,
        message=f"{finding.message}; {rose}" if rose else finding.message,
    )


def bad_buffer(record: StepRecord, name: str) -> Incident:
    """On several ranks a buffer is this rank's own, and cannot refuse a step whose backward was not
    the guard's."""
    return Incident(
        step=record.step,
        kind="nonfinite-weight",
        action="recorded",
        loss=record.loss,
        grad_norm=record.grad_norm,
        message=wording.kept_buffer(name),
    )


def largest(norms: Iterable[tuple[str, float]]) -> tuple[tuple[str, float], ...]:
    """The parameters with the largest gradients, largest first."""
    return tuple(sorted(norms, key=lambda pair: -pair[1])[:_NAMED])


def best_explained(incidents: Sequence[Incident], last: Incident, steps: int) -> Incident | None:
    """Return the incident with the best diagnosis among those that led to the last one, or None if none has any. They are the
    incidents of the last `steps` steps, those that `same_as` names, and a divergence shortly before. A named and verified cause
    is best, then a named one, then the surest; of equals the latest."""
    led = [i for i in incidents if last.step - (_GROWING if i.kind == "divergence" else steps) < i.step <= last.step]
    named = {(i.kind, i.same_as) for i in (*led, last) if i.same_as is not None}
    led = [*(i for i in incidents if (i.kind, i.step) in named), *led, last]

    def worth(pair: tuple[int, Incident]) -> tuple[bool, bool, float, int]:
        place, diagnosis = pair[0], pair[1].diagnosis
        assert diagnosis is not None
        return diagnosis.named and diagnosis.verified, diagnosis.named, diagnosis.confidence, place

    explained = [(place, i) for place, i in enumerate(led) if i.diagnosis is not None]
    return max(explained, key=worth)[1] if explained else None
