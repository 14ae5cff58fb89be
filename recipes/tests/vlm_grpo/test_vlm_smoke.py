"""The word that a smoke test ends with: nothing bad is healthy, and nothing that nobody handled is handled."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from nanproof.core.support._context import rehearsal
from nanproof_recipes.vlm_grpo.faults import Session
from nanproof_recipes.vlm_grpo.smoke import EXIT, Smoked

INCIDENT = {
    "v": 2,
    "step": 1,
    "kind": "nonfinite-gradient",
    "action": "skipped",
    "message": "seen",
    "loss": None,
    "grad_norm": None,
    "culprits": [],
    "diagnosis": {"cause": "exp-overflow", "confidence": 1.0, "phase": "loss", "fix": "Mask before exp.", "verified": True},
}
WELL = Smoked(
    arm="fixed",
    trainer="trl",
    fault="none",
    fired=False,
    guarded=True,
    ending="finished",
    wanted=6,
    steps=6,
    taken=6,
    seconds=2.0,
    first_reward=0.1,
    last_reward=0.2,
    bad_losses=0,
    bad_gradients=0,
    rows=2304,
    bad_rows=0,
    first_bad_row=None,
    rewards=384,
    bad_rewards=0,
    tensors=42,
    nonfinite=0,
    refused=0,
    skipped=0,
    rolled_back=0,
    records="out/smoke/session/nanproof",
)


def test_nothing_bad_is_healthy_with_and_without_a_guard():
    assert WELL.outcome == replace(WELL, guarded=False).outcome == "healthy"
    assert WELL.lines()[0] == "healthy: fixed, trl" and EXIT == {"healthy": 0, "handled": 1, "failed": 3}


@pytest.mark.parametrize(
    "met",
    [
        {"bad_losses": 1},
        {"bad_gradients": 1},
        {"bad_rows": 1},
        {"bad_rewards": 1},
        {"refused": 1},
        {"skipped": 1, "taken": 5},
        {"incidents": [INCIDENT]},
    ],
)
def test_what_a_guard_met_is_handled_and_without_one_it_has_failed(met):
    handled, failed = replace(WELL, **met), replace(WELL, **met, guarded=False)
    assert (handled.outcome, failed.outcome) == ("handled", "failed")
    assert "not fine" in handled.advice[0] and failed.advice[0] == "Do not start a long run."
    assert handled.to_json()["exit"] == 1 and json.loads(json.dumps(failed.to_json(), allow_nan=False))["exit"] == 3


@pytest.mark.parametrize(
    "end", [{"ending": "halted: too many"}, {"ending": "raised RuntimeError: x"}, {"nonfinite": 1}, {"skipped": 6, "taken": 0}]
)
def test_dead_halted_or_not_finite_is_failed_with_a_guard_too(end):
    assert replace(WELL, **end).outcome == "failed"


def test_the_text_says_what_was_met_its_cause_and_what_to_do():
    found = replace(WELL, fault="logits", fired=True, bad_rows=1, first_bad_row="in generation 1, row 0, token 2")
    text = "\n".join(replace(found, incidents=[INCIDENT]).lines())
    for said in ("handled: fixed, trl, fault logits\n", "NaN or Inf in 1 of 2304 rows", "row 0, token 2", "Mask before exp."):
        assert said in text
    assert "cause      exp-overflow, its fix verified on the replay" in text and "nanproof report out/smoke" in text
    assert "which was not reached" in replace(found, fired=False).lines()[0]
    assert any("born in" in said for said in found.advice), "without an incident there is advice too"


# -- what a session counts ------------------------------------------------------------------------------------------------------


def test_a_forward_that_is_run_again_only_to_look_is_not_counted():
    """As it is where a row went bad: it would be one more generation, and its bad rows would count twice."""

    class Model(torch.nn.Module):
        def forward(self, input_ids):
            return SimpleNamespace(logits=torch.full((len(input_ids), 1, 5), math.nan))

    model = Model()
    session = Session(model, batch=2, trainer="loop")
    with torch.no_grad():
        model(input_ids=torch.zeros(2, 3))
        with rehearsal:
            model(input_ids=torch.zeros(2, 3))
    session.undo()
    assert (session.rows, session.bad_rows, session.first_bad_row) == (2, 2, "in generation 0, row 0, token 0")
    assert not model._forward_hooks


def test_an_incident_like_an_earlier_one_names_it():
    like = {**INCIDENT, "step": 3, "diagnosis": None, "same_as": 1}
    lines = replace(WELL, refused=3, incidents=[INCIDENT, like, {**like, "same_as": None}]).lines()
    causes = [line.split(None, 1)[1] for line in lines if line.startswith("  cause ")]
    assert causes == ["exp-overflow, its fix verified on the replay", "as at step 1", "not found"]
