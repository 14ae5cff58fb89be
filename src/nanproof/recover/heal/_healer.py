"""Healer: applies the fix that was verified on the bad step to the run, watches whether it holds,
and takes it back if not.

A remedy is on probation until `PROVE` healthy steps have passed. If the same incident comes back
before, it is undone and the next one is tried; when none is left, the guard's other means
(skipping, the cap) act as if there were no healer.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

from nanproof._records import Incident
from nanproof.core import _contracts as contracts
from nanproof.core.judge._stepper import Stepper
from nanproof.explain._case import Case, Prescription
from nanproof.explain.replay._rehearse import rehearse
from nanproof.explain.replay._replay import CannotReplay, Deadline
from nanproof.recover.heal._remedies import Again, Patient, Remedy

log = logging.getLogger("nanproof")

PROVE = 20
"""Healthy steps after which a remedy has proved itself."""
HUGE = 1e3
"""A gradient this many times the largest of the run so far is finite and does harm all the same,
where nothing clips it."""
MOST = 8
"""Remedies in force at the same time; a run that needs more of them needs a person."""


@dataclass(slots=True)
class Treatment:
    """A remedy in force, and what it is for."""

    remedy: Remedy
    kind: str
    cause: str
    step: int
    healthy: int = 0
    """Accepted steps since."""

    @property
    def proven(self) -> bool:
        return self.healthy >= PROVE


class Healer(contracts.Healer):
    """Holds the remedies in force."""

    name = "heal"

    def __init__(self, patient: Patient, on: bool, seconds: float = 30.0) -> None:
        self.on = on
        self.patient = patient
        self.applied: list[Treatment] = []
        self._seconds = seconds
        self._tried: set[str] = set()

    @classmethod
    def of(cls, stepper: Stepper, scheduler: Any) -> Healer:
        """The healer of a run."""

        def follow() -> None:
            stepper.follow()
            stepper.buffers.refresh()

        policy = stepper.policy
        if policy.heal and stepper.ranks.several:
            log.warning("nanproof: Policy(heal=True) is off: a remedy would act on one rank of several only")
        patient = Patient(stepper.model, stepper.optimizer, scheduler, follow)
        return cls(patient, policy.heal and not stepper.ranks.several, policy.diagnose_seconds)

    def living(self, training: bool = True) -> AbstractContextManager[Any]:
        """Open around every forward and backward; nothing at all while no remedy is in force."""
        if not self.applied:
            return super().living(training)
        stack = ExitStack()
        try:
            for treatment in self.applied:
                context = treatment.remedy.living() if training or treatment.remedy.in_evaluation else None
                if context is not None:
                    stack.enter_context(context)
        except BaseException:
            stack.close()
            raise
        return stack

    def accepted(self) -> None:
        for treatment in self.applied:
            treatment.healthy += 1

    def undo_failed(self, incident: Incident) -> tuple[str, ...]:
        cause = incident.diagnosis.cause if incident.diagnosis is not None else ""
        failed = [
            t for t in self.applied if not t.proven and t.kind == incident.kind and (t.cause == cause or t.step == incident.step)
        ]
        for treatment in reversed(failed):
            self._undo(treatment)
        return tuple(treatment.remedy.description for treatment in failed)

    def offer(self, incident: Incident, case: Case | None) -> str | None:
        found = self._next(incident, case)
        return None if found is None else found[1].description

    def apply(self, incident: Incident, case: Case | None) -> bool:
        found = self._next(incident, case)
        if found is None or incident.diagnosis is None:
            return False
        key, remedy = found
        self._tried.add(key)
        return self.treat(Treatment(remedy, incident.kind, incident.diagnosis.cause, incident.step), case)

    def _next(self, incident: Incident, case: Case | None) -> tuple[str, Remedy] | None:
        """The next remedy that was not tried for such an incident yet, mildest first, and what it
        is remembered by."""
        diagnosis = incident.diagnosis
        if not self.on or diagnosis is None or not diagnosis.verified or case is None or case.replay is None:
            return None
        return self.untried(diagnosis.cause, incident.kind, case.remedies, incident.step)

    def untried(self, cause: str, kind: str, remedies: Sequence[Prescription], step: int = 0) -> tuple[str, Remedy] | None:
        """The first of these prescriptions that was not tried for such an incident yet, and what it
        is remembered by."""
        if len(self.applied) >= MOST:
            return None
        for prescription in remedies:
            known = Remedy.known.get(prescription.name)
            if known is None:
                continue
            what = [kind, cause, prescription.name, prescription.settings]
            # One that changes nothing for later steps may help a later one again.
            key = json.dumps([*what, step] if known.once else what, sort_keys=True)
            if key not in self._tried:
                return key, known(self.patient, **prescription.settings)
        return None

    def treat(self, treatment: Treatment, case: Case | None = None) -> bool:
        """Put a remedy in force; undone at once where the bad step is still bad under it. No step
        may be under way."""
        remedy = treatment.remedy
        for other in [t for t in self.applied if t.cause == treatment.cause and remedy.replaces(t.remedy)]:
            self._undo(other)
        try:
            remedy.apply()
            if not isinstance(remedy, Again):
                self.applied.append(treatment)
            if self._bears(case):
                return True
        except Exception as error:
            log.debug("nanproof: a remedy failed", exc_info=True)
            log.warning("nanproof: could not heal (%s): %s: %s", remedy.name, type(error).__name__, error)
        self._undo(treatment)
        return False

    def state_dict(self) -> dict[str, Any]:
        """By name and settings, as plain data."""
        lasting = [t for t in self.applied if not t.remedy.once]
        return {
            "applied": [
                {
                    "name": t.remedy.name,
                    "settings": t.remedy.settings,
                    "kind": t.kind,
                    "cause": t.cause,
                    "step": t.step,
                    "healthy": t.healthy,
                }
                for t in lasting
            ],
            "tried": sorted(self._tried),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put the same remedies in force; those that are already stay as they are. Not where
        healing is off: that was chosen."""
        if not self.on:
            if state["applied"]:
                names = [saved["name"] for saved in state["applied"]]
                said = "".join(
                    f". {known.without}" for n in names if (known := Remedy.known.get(n)) is not None and known.without
                )
                log.warning(
                    "nanproof: this run was healed (%s); without Policy(heal=True) it goes on without that%s",
                    ", ".join(names),
                    said,
                )
            return
        self._tried = set(state["tried"])
        there = [(t.remedy.name, t.remedy.settings) for t in self.applied]
        for saved in state["applied"]:
            if (saved["name"], saved["settings"]) in there:
                continue
            remedy = Remedy.known[saved["name"]](self.patient, **saved["settings"])
            remedy.adopt()
            self.applied.append(Treatment(remedy, saved["kind"], saved["cause"], saved["step"], saved["healthy"]))

    def restored(self, state: dict[str, Any]) -> None:
        """What was done to settings since has gone with them and is done again.
        What was tried is not forgotten."""
        there = [(saved["name"], saved["settings"]) for saved in state["applied"]]
        for treatment in self.applied:
            remedy = treatment.remedy
            if remedy.in_checkpoints and (remedy.name, remedy.settings) not in there:
                remedy.apply()

    def _bears(self, case: Case | None) -> bool:
        """The bad step once more, with everything in force."""
        if case is None or case.replay is None:
            return True
        case.replay.deadline = Deadline.after(self._seconds)
        try:
            if case.kind == "divergence" and case.moments:
                # Finite it was before: here the loss has to come down, or the weights are past healing.
                last = case.moments[-1]
                now = case.replay.run(batches=last.batches, random=last.random, backward=False).loss
                losses = rehearse(case.replay, self.patient.optimizer, case.moments, max_norm=case.max_norm, rounds=2)
                return losses is None or losses[-1] <= now
            outcome = case.replay.run()
            return outcome.finite and not outcome.total > _bearable(case)
        except CannotReplay:
            return False

    def _undo(self, treatment: Treatment) -> None:
        self.applied = [t for t in self.applied if t is not treatment]
        try:
            treatment.remedy.undo()
        except Exception as error:
            log.debug("nanproof: a remedy could not be undone", exc_info=True)
            log.warning("nanproof: could not undo %s: %s: %s", treatment.remedy.name, type(error).__name__, error)


def _bearable(case: Case) -> float:
    """The largest gradient norm that the step may have under a remedy."""
    taken = [r.grad_norm for r in case.history if r.action != "skipped" and math.isfinite(r.grad_norm)]
    return HUGE * max(taken) if taken and case.nonfinite and case.max_norm is None else math.inf
