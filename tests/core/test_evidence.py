"""Which of a run's incidents explains best why it was halted."""

from __future__ import annotations

import pytest
import torch

import nanproof
from nanproof._records import Diagnosis, Incident
from nanproof.core._evidence import best_explained
from toys import mse, net


def incident(step, cause=None, confidence=0.9, verified=False, kind="nonfinite-loss", same_as=None):
    diagnosis = None if cause is None else Diagnosis(cause=cause, confidence=confidence, verified=verified)
    return Incident(step=step, kind=kind, action="skipped", diagnosis=diagnosis, same_as=same_as)


UNKNOWN = ("unknown", 0.0)


@pytest.mark.parametrize(
    ("incidents", "last", "best"),
    [
        ([incident(5, "a", 0.5, True), incident(6, "b", 0.99)], incident(7), 5),
        ([incident(4, "too early", 0.9, True)], incident(7), None),
        ([incident(5, *UNKNOWN), incident(6, "b", 0.4)], incident(7, *UNKNOWN), 6),
        ([incident(5, "a", 0.6), incident(6, "b", 0.8)], incident(7), 6),
        ([incident(5, "a", 0.6)], incident(7, "b", 0.6), 7),
        ([incident(1, "old", 0.9, True), incident(6, "b", 0.4)], incident(7), 6),
        ([incident(1, "old", 0.9, True)], incident(7, same_as=1), 1),
        ([incident(1, "old", 0.9, True), incident(6, same_as=1)], incident(7, *UNKNOWN), 1),
        ([incident(1, "rate", 0.9, kind="divergence")], incident(7, *UNKNOWN), 1),
        ([incident(1, "old", 0.9, True)], incident(7), None),
        ([], incident(7), None),
    ],
    ids=[
        "verified comes before sure",
        "not one from just before",
        "named comes before unknown",
        "the surest",
        "of equals the latest",
        "not one from before",
        "the one it is like",
        "the one that another is like",
        "a divergence that began before",
        "not one from before, if that is all",
        "nothing",
    ],
)
def test_the_best_diagnosis_among_those_that_led_to_the_halt(incidents, last, best):
    chosen = best_explained([*incidents, last], last, steps=3)
    assert (None if chosen is None else chosen.step) == best


def test_an_incident_of_another_kind_at_the_same_step_is_not_meant_by_same_as():
    spike, like, last = incident(1, "other", 0.9, True, kind="spike"), incident(1, "right", 0.5), incident(7, same_as=1)
    assert best_explained([spike, like, last], last, steps=3) is like


def test_the_line_that_halts_a_run_carries_it():
    """The first refused step is explained, and the one that reaches the cap is not."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    guard = nanproof.Guard(model, optimizer, policy=nanproof.Policy(max_consecutive_skips=2))
    with pytest.raises(nanproof.TrainingHalted) as halted, guard:
        for i in range(8):
            if i != 4:  # the gradients of step 3 stay
                optimizer.zero_grad()
            loss = mse(model, (torch.randn(4, 6), torch.randn(4))) * (float("nan") if i >= 3 and i != 4 else 1)
            loss.backward()
            guard.step(loss)
    named = {i.step: i.diagnosis.cause for i in guard.incidents if i.diagnosis is not None and i.diagnosis.named}
    assert named == {4: "gradients-not-cleared"}
    assert halted.value.incident.step == 5 and "gradients-not-cleared" in str(halted.value)
