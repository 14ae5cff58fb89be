"""Every case of the zoo under the guard: the right cause at the right step, and silence over the healthy twin."""

from __future__ import annotations

import pytest

from nanproof.explain import causes  # noqa: F401
from nanproof.explain._cause import Cause
from zoo.guarded import run
from zoo.plain import load
from zoo.registry import CASES

load()

BROKEN = sorted(name for name, case in CASES.items() if case.cause != "benign")
LATE = {"sensors_that_come_on_after_400_steps": "the update grows at step 400, the loss shows it at step 403"}
"""Cases that are dated some steps too late, and why."""
NOT_VERIFIED = {
    "short_last_batch_overflows_once": "a loop of the user's own cannot be run again",
    "calibration_overflow_never_cleared": "a loop of the user's own cannot be run again",
    "batch_normalised_in_place": "what the batch held before the step is gone",
    "rows_normalised_between_steps": "what wrote into the weights is not part of the step",
    "averaged_weights_swapped_in": "what wrote into the weights is not part of the step",
    "gradients_of_all_steps_added_up": "a loop of the user's own cannot be run again",
    "moments_lost_when_the_job_moved": "the moments are gone, so a step with them cannot be tried",
    "accuracy_used_as_the_loss": "argmax has no gradient with anything left out: the loss has to be another one",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", BROKEN)
def test_the_cause_is_named(name):
    """The first incident names cause, step, sample and operation, and the fix held on the replay."""
    case = CASES[name]
    first = run(case.build(False)).first
    assert first is not None, "nothing was said"
    diagnosis = first.diagnosis
    assert diagnosis is not None
    assert diagnosis.cause in (case.cause, *case.also), diagnosis
    assert diagnosis.evidence and diagnosis.fix
    if case.step is not None and name not in LATE:
        assert first.step == case.step
    if case.sample is not None:
        assert diagnosis.samples == (case.sample,)
    if case.op is not None:
        assert diagnosis.op is not None and case.op in diagnosis.op
    if name not in NOT_VERIFIED:
        assert diagnosis.verified, diagnosis.evidence


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(CASES))
def test_the_healthy_twin_is_left_alone(name):
    """A false alarm is as much a defect as a miss."""
    case = CASES[name]
    for fixed in (True,) if case.cause != "benign" else (False, True):
        told = run(case.build(fixed))
        assert told.incidents == [] and told.error is None


def test_every_cause_of_the_catalogue_has_a_case():
    """`one-rank-nonfinite` needs two processes and is tested in test_ranks; `loss-scale-collapse` is made of other causes."""
    slugs = {cause.slug for cause in Cause.catalogue} | {"loss-scale-collapse"}
    covered = {case.cause for case in CASES.values()} - {"benign"}
    assert slugs - covered == set()
    assert covered - slugs == set()
    assert len(CASES) >= 60
