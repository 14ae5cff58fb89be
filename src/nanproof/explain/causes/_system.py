"""Causes outside the model: a fault that does not come back, and one rank that spoils the others' step."""

from __future__ import annotations

import math

from nanproof.explain._case import Case, Prescription, Trial
from nanproof.explain._cause import Cause, Match
from nanproof.explain._controls import rejected
from nanproof.explain.causes._raised import passed_through
from nanproof.explain.locate._calls import CallStack
from nanproof.explain.locate._uninitialised import FilledMemory


class TransientFault(Cause):
    """A one-off NaN that the same step does not show again."""

    slug = "transient-fault"
    fix = (
        "Train on the batch again. If it recurs on one machine, suspect its device or memory; elsewhere a race, or a "
        "non_blocking copy that is read too early."
    )

    def match(self, case: Case) -> Match | None:
        if (
            not case.nonfinite
            or case.weights_broke
            or case.bad_buffer
            or case.signal
            or case.control is None
            or not case.control.finite
        ):
            return None
        if case.bad_weights or case.bad_buffers or case.bad_settings:
            return None
        return Match(
            confidence=0.9,
            evidence=(f"the same step from the same state, run again: {case.control}",),
            phase="system",
            trial=lambda: self._again(case),
            tried="nothing changed, run once more",
        )

    def _again(self, case: Case) -> Trial:
        assert case.replay is not None and case.control is not None
        second = case.replay.run()
        result = str(second) + (", the same" if second.same_as(case.control) else ", not the same each time")
        trial = Trial(second.finite, result, (Prescription("again"),))
        if case.error is not None and not passed_through(case.error, case.replay.loss_fn):
            return rejected(trial, "the exception came from after forward and backward, which is not run again")
        # The control has NaN in all memory that is allocated without being filled: a read of it may be finite by chance.
        filled = case.replay.run(*FilledMemory(lambda _: math.nan, CallStack(case.replay.model)).watching())
        return rejected(trial, "" if filled.finite else "with NaN in memory that is never written it is not finite")
