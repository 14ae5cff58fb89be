"""Inquest: from a refused step to what it was. Asks the other ranks, the gradients, and where it must, a replay."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace

import torch

from nanproof.core.attempts import Attempt
from nanproof.core.evidence import Gradients, Witness, make_incident
from nanproof.core.ranks import Ranks
from nanproof.core.runner import Runner
from nanproof.core.stepper import Report
from nanproof.core.terms import NamedTerms, Terms, mean_of, of_the_terms, read
from nanproof.core.verdict import Reading
from nanproof.records import Incident

log = logging.getLogger("nanproof")


def remarked(attempt: Attempt, micro_batch: int | None) -> str:
    """What was remarked on the step, or on the micro-batch that was bad. A remark that cannot be had is none."""
    remarks = list(enumerate(attempt.remarks))
    if micro_batch is not None and micro_batch < len(remarks):
        remarks = [remarks[micro_batch]]
    said = []
    for i, remark in remarks:
        try:
            text = remark()
        except Exception:
            log.debug("nanproof: a remark on step %d failed", attempt.step, exc_info=True)
            continue
        if text:
            said.append(f"micro-batch {i}: {text}" if len(remarks) > 1 else text)
    return "; ".join(said)


def of_the_bad(report: Report, micro_batch: int | None) -> Terms | None:
    """The terms of the micro-batch that was bad; of all of them where that is not known."""
    if micro_batch is None:
        return mean_of(report.terms)
    if len(report.terms) != len(report.losses):  # the loss was given with the step: it is that of the last backward
        micro_batch -= max(len(report.losses), len(report.probes)) - 1
    return report.terms[micro_batch] if 0 <= micro_batch < len(report.terms) else None


def told(incident: Incident, terms: NamedTerms, said: str, ranks: Ranks) -> Incident:
    """The incident with what the rank that was bad knows of it: terms of the loss, remarks. Every rank takes part, also one that
    knows nothing."""
    if ranks.together:
        text = json.dumps([said, terms]) if said or terms else ""
        shared = ranks.share_text(text, incident.rank if incident.rank is not None else ranks.members[0])
        said, pairs = json.loads(shared) if shared else ("", ())
        terms = tuple((name, value) for name, value in pairs)
    if incident.kind == "nonfinite-loss" and "of the terms" not in said:
        said = "; ".join(filter(None, (of_the_terms(terms), said)))
    return replace(incident, terms=terms, message=f"{incident.message}; {said}" if said else incident.message)


class Inquest:
    """Finds out what a refused step was; every rank comes to it at the same step."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.state_broken = False
        """Weights, optimizer state or loss scale were non-finite before the step."""
        self.one_rank = False
        """The step was bad on one rank only."""
        self.bad_buffer = ""
        """The buffer that the forward made non-finite."""
        self._overflowed = -2
        """The last step of a loop of the user's own that overflowed."""

    def hold(self, attempt: Attempt, report: Report, reading: Reading, refused_before: int) -> Incident | None:
        """What the step was; None for an overflow that only calibrates the loss scale, which is healthy."""
        incident = self._find(attempt, report, reading, refused_before)
        if incident is None:
            return None
        said, terms = remarked(attempt, incident.micro_batch), read(of_the_bad(report, incident.micro_batch))
        return told(incident, terms, said, self._runner.stepper.ranks)

    def _find(self, attempt: Attempt, report: Report, reading: Reading, refused_before: int) -> Incident | None:
        stepper, again = self._runner.stepper, attempt.batches is not None
        # Every time, also when refusals follow each other: what was written in between is not to be blamed on the data.
        broken = stepper.broken_state()
        weights_bad = bool(broken)
        self.bad_buffer = stepper.buffers.name_at(reading.bad_buffer) if reading.bad_buffer else ""
        if self.bad_buffer:
            broken.append(self.bad_buffer)
        witness = Witness.hear(stepper.ranks, reading, report.losses, report.probes, weights_bad)
        self.one_rank, self.state_broken = witness.guilty <= 1, witness.weights_bad
        if reading.scale is not None and not 0 < reading.scale < math.inf:
            self.state_broken = True
            message = f"the loss scale is {reading.scale:g}: something other than the guard wrote it"
            return Incident(step=attempt.step, kind="loss-scale-collapse", action="skipped", message=message)
        gradients: Gradients | None = None
        if witness.only_gradients and not reading.weights_bad and not reading.total < torch.inf:
            if again and (stepper.scale is not None or stepper.lag or (stepper.ranks.together and witness.rank is None)):
                gradients = self._runner.replay(attempt)
                if stepper.scale is not None and not stepper.scale.fixed and gradients is not None and gradients.all_finite:
                    stepper.scale.back_off()
                    return None
                if gradients is not None and all(math.isfinite(norm) for _, norm in gradients.norms):
                    gradients = None  # gone when run again: what was bad is known from the norms of then
            elif not again and reading.scale is not None and reading.scale >= 1:
                stays = stepper.uncleared and self._overflowed == attempt.step - 1
                self._overflowed = attempt.step
                if not stays:
                    return None
            elif not stepper.lag:
                gradients = stepper.look_at_gradients(report.present)
        norms = [(report.names[i], norm) for i, norm in zip(report.present, reading.norms, strict=True)]
        incident = make_incident(attempt.step, reading, norms, witness, gradients, broken)
        if reading.weights_bad and stepper.weights is not None and not stepper.weights.restore:
            self.state_broken = True
            return replace(incident, action="recorded", message=incident.message + "; no copy was kept to put back")
        if incident.kind == "nonfinite-gradient" and not again and refused_before:
            hint = "; the step before was refused too: was zero_grad called in between?"
            incident = replace(incident, message=incident.message + hint)
        if incident.kind == "nonfinite-gradient" and reading.scale is not None and reading.scale < 1 and not again:
            message = f"{incident.message}; the loss scale is down to {reading.scale:g}, so it is no range problem"
            return replace(incident, kind="loss-scale-collapse", message=message)
        return incident
