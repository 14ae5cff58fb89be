"""Inquest: find out what a refused step was. Asks the other ranks, the gradients, and where it
must, a replay."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import replace

import torch

from nanproof import _wording as wording
from nanproof._records import Incident
from nanproof.core._contracts import Explainer
from nanproof.core._evidence import Gradients, Witness, make_incident
from nanproof.core._under_way import Attempt, Remark
from nanproof.core.judge._judge import Judge, Report
from nanproof.core.judge._terms import NamedTerms, Terms, mean_of, read
from nanproof.core.judge._verdict import Reading
from nanproof.core.support._members import bad_settings, groups_of
from nanproof.core.support._ranks import Ranks

log = logging.getLogger("nanproof")


def remarked(attempt: Attempt, micro_batch: int | None) -> Remark:
    """What was remarked on the step, or on the micro-batch that was bad. A remark that cannot be
    read is ignored."""
    remarks = list(enumerate(attempt.remarks))
    if micro_batch is not None and micro_batch < len(remarks):
        remarks = [remarks[micro_batch]]
    texts, names_terms = [], False
    for i, read_remark in remarks:
        try:
            remark = read_remark()
        except Exception:
            log.debug("nanproof: a remark on step %d failed", attempt.step, exc_info=True)
            continue
        names_terms |= remark.names_terms
        if remark.text:
            texts.append(f"micro-batch {i}: {remark.text}" if len(remarks) > 1 else remark.text)
    return Remark("; ".join(texts), names_terms)


def of_the_bad(report: Report, micro_batch: int | None) -> Terms | None:
    """The terms of the micro-batch that was bad; of all of them where that is not known."""
    if micro_batch is None:
        return mean_of(report.terms)
    if len(report.terms) != len(report.losses):  # the loss was given with the step: it is that of the last backward
        micro_batch -= max(len(report.losses), len(report.probes)) - 1
    return report.terms[micro_batch] if 0 <= micro_batch < len(report.terms) else None


def with_terms(incident: Incident, terms: NamedTerms, remark: Remark, ranks: Ranks) -> Incident:
    """The incident with what the rank that was bad knows of it: terms of the loss, remarks. Every
    rank takes part, also one that knows nothing."""
    if ranks.together:
        text = json.dumps([remark.text, remark.names_terms, terms]) if remark.text or terms else ""
        shared = ranks.share_text(text, incident.rank if incident.rank is not None else ranks.members[0])
        text, names_terms, pairs = json.loads(shared) if shared else ("", False, ())
        remark, terms = Remark(text, names_terms), tuple((name, value) for name, value in pairs)
    bad = wording.bad_terms(terms) if incident.kind == "nonfinite-loss" and not remark.names_terms else ""
    return replace(incident, terms=terms, message="; ".join(filter(None, (incident.message, bad, remark.text))))


class Inquest:
    """Finds out what a refused step was; every rank comes to it at the same step."""

    def __init__(self, judge: Judge, explainer: Explainer) -> None:
        self._judge, self._explainer = judge, explainer
        self.state_broken = False
        """Weights, optimizer state or loss scale were non-finite before the step."""
        self.one_rank = False
        """The step was bad on one rank only."""
        self.bad_buffer = ""
        """The buffer that the forward made non-finite."""
        self._overflowed = -2
        """The last step of a loop of the user's own that overflowed."""

    def hold(self, attempt: Attempt, report: Report, reading: Reading, refused_before: int) -> Incident | None:
        """What the step was; None for an overflow that only calibrates the loss scale, which is
        healthy."""
        incident = self._find(attempt, report, reading, refused_before)
        if incident is None:
            return None
        remark, terms = remarked(attempt, incident.micro_batch), read(of_the_bad(report, incident.micro_batch))
        return with_terms(incident, terms, remark, self._judge.ranks)

    def _find(self, attempt: Attempt, report: Report, reading: Reading, refused_before: int) -> Incident | None:
        judge, again = self._judge, attempt.batches is not None
        # Every time, also when refusals follow each other: what was written in between is not to be blamed on the data.
        broken = judge.broken_state()
        weights_bad = bool(broken)
        self.bad_buffer = judge.buffers.name_at(reading.bad_buffer) if reading.bad_buffer else ""
        if self.bad_buffer:
            broken.append(self.bad_buffer)
        mine = judge.own_reading(reading, report)
        witness = Witness.hear(judge.ranks, mine, report.losses, report.probes, weights_bad)
        self.one_rank, self.state_broken = witness.guilty <= 1, witness.weights_bad
        if reading.scale is not None and not 0 < reading.scale < math.inf:
            self.state_broken = True
            seen = wording.bad_scale(reading.scale)
            return Incident(step=attempt.step, kind="loss-scale-collapse", action="skipped", message=seen)
        gradients: Gradients | None = None
        settings, affected = self._settings(report, reading)
        if witness.only_gradients and not reading.weights_bad and not reading.total < torch.inf:
            if again and (judge.scaled or judge.lag or (judge.ranks.together and witness.rank is None)):
                gradients = self._explainer.rehearse(attempt)
                if judge.calibrates and judge.scale is not None and gradients is not None and gradients.all_finite:
                    judge.scale.back_off()
                    return None
                if gradients is not None and all(math.isfinite(norm) for _, norm in gradients.norms or ()):
                    gradients = None  # gone when run again: what was bad is known from the norms of then
            elif not again and judge.calibrates_at(reading):
                stays = judge.uncleared and self._overflowed == attempt.step - 1
                self._overflowed = attempt.step
                if not stays:
                    return None
            elif not judge.lag:
                gradients = judge.look_at_gradients(report.present)
        norms = [(report.names[i], norm) for i, norm in zip(report.present, reading.norms, strict=True)]
        unclipped = [] if attempt.unclipped is None else attempt.unclipped.values.tolist()
        if len(unclipped) == len(norms) and not all(map(math.isfinite, unclipped)):
            norms = [(name, before) for (name, _), before in zip(norms, unclipped, strict=True)]
            gradients = None  # those that are there have been written into since
        keeper = judge.weights
        incident = make_incident(
            attempt.step,
            mine,
            norms,
            witness,
            gradients,
            broken,
            settings=settings,
            affected=affected,
            put_back=keeper is not None and keeper.restore,
        )
        incident = replace(incident, loss=reading.loss)
        if reading.weights_bad and judge.weights is not None and not judge.weights.restore:
            self.state_broken = True
            return replace(incident, action="recorded", message=f"{incident.message}; {wording.NO_COPY}")
        if incident.kind == "nonfinite-gradient" and not again and refused_before:
            incident = replace(incident, message=f"{incident.message}; {wording.NOT_CLEARED}")
        if incident.kind == "nonfinite-gradient" and reading.scale is not None and reading.scale < 1 and not again:
            seen = wording.collapsed_scale(incident.message, reading.scale)
            return replace(incident, kind="loss-scale-collapse", message=seen)
        return incident

    def _settings(self, report: Report, reading: Reading) -> tuple[tuple[str, ...], int]:
        """The optimizer's settings that are non-finite, in words, and how many parameters they apply to."""
        if not reading.bad_setting:
            return (), 0
        judge = self._judge
        found = bad_settings(judge.optimizer)
        groups = {id(bad.group) for bad in found}
        hit = {id(p) for group in groups_of(judge.optimizer) if id(group) in groups for p in group["params"]}
        affected = [i for i in report.present if id(judge.parameters.tensors[i]) in hit]
        return report.settings or tuple(map(str, found)), len(affected or report.present)
