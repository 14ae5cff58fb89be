"""What the comparison claims: each check holds for what was measured, and fails when the measurement says otherwise."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from nanproof_recipes.units_sft.arms import REPORTED
from nanproof_recipes.units_sft.comparing import checks, told
from nanproof_recipes.units_sft.models import REAL
from nanproof_recipes.units_sft.results import Result
from nanproof_recipes.units_sft.workshop import Workshop

LOST = {
    "grad_norm": math.nan,
    "valid_loss": math.nan,
    "nonfinite": 28,
    "tensors": 28,
    "curves": {"step": [1, 5], "loss": [2.0, 0.0], "grad_norm": [1.5, math.nan]},
}
WELL = {"grad_norm": 1.0, "valid_loss": 2.0, "nonfinite": 0, "tensors": 28, "curves": {"step": [1, 5], "loss": [3.0, 2.0]}}
HEALED = {"message": "x", "remedy": "y", "diagnosis": {"cause": "fp16-optimizer-underflow", "verified": True}}


def results():
    """As the recipe says it is."""
    found = [
        Result(name="broken", setting={}, **LOST),
        Result(name="patched-002", setting={}, **LOST),
        Result(name="patched-000", setting={}, notes=["the checks that document 000 names pass after the first step"], **LOST),
        Result(name="patched-001", setting={}, answer_rate=0.99, **WELL),
        Result(name="broken-prompt", setting={}, **WELL),
        Result(name="guarded", setting={}, accuracy=0.10, incidents=[HEALED], **WELL),
        Result(name="fixed-reported", setting={}, accuracy=0.14, **WELL),
        Result(name="guarded-tuned", setting={}, accuracy=0.62, incidents=[HEALED], **WELL),
        Result(name="fixed", setting={}, accuracy=0.64, answer_rate=0.99, questions=1000, **WELL),
        Result(name="rft", setting={}, accuracy=0.66, **WELL),
    ]
    return {result.name: result for result in found}


def failing(by_name, real=True):
    return [check.claim for check in checks(by_name, real) if not check.holds]


def test_every_claim_holds_where_it_should():
    found = list(checks(results(), real=True))
    assert len(found) == 14 and failing(results()) == []
    assert all(check.measured for check in found)
    assert len(list(checks(results(), real=False))) == 9


@pytest.mark.parametrize(
    ("name", "change", "claim"),
    [
        ("broken", {"grad_norm": 1.0}, "broken: grad_norm nan"),
        ("broken", {"nonfinite": 27}, "broken: grad_norm nan"),
        ("broken", {"accuracy": 0.001}, "broken: grad_norm nan"),
        ("patched-002", {"grad_norm": None}, "patched-002: grad_norm nan"),
        (
            "patched-000",
            {"notes": ["the checks that document 000 names do not pass after the first step"]},
            "patched-000: passes",
        ),
        ("patched-000", {"nonfinite": 0}, "patched-000: passes"),
        ("patched-001", {"nonfinite": 1}, "patched-001: fp32"),
        ("patched-001", {"valid_loss": math.nan}, "patched-001: fp32"),
        ("patched-001", {"curves": {"loss": [2.0, 2.0]}}, "patched-001: fp32"),
        ("patched-001", {"answer_rate": 0.5}, "broken-prompt: learns"),
        ("patched-002", {"curves": {**LOST["curves"], "loss": [2.1, 0.0]}}, "patched-002: its log"),
        ("guarded", {"valid_loss": 2.2}, "guarded: held-out loss"),
        ("broken-prompt", {"answer_rate": 0.1}, "broken-prompt: learns"),
        ("broken-prompt", {"nonfinite": 28}, "broken-prompt: learns"),
        ("guarded", {"incidents": []}, "guarded: names the cause"),
        ("guarded", {"incidents": [{**HEALED, "message": "x; healed: y", "remedy": None}]}, "guarded: names the cause"),
        ("guarded", {"incidents": [{**HEALED, "diagnosis": None}]}, "guarded: names the cause"),
        ("guarded", {"incidents": [{**HEALED, "diagnosis": {"cause": "x", "verified": False}}]}, "guarded: names the cause"),
        ("guarded", {"nonfinite": 1}, "guarded: names the cause"),
        ("guarded", {"accuracy": 0.2}, "guarded: accuracy within"),
        ("guarded-tuned", {"accuracy": 0.5}, "guarded-tuned: accuracy within"),
        ("fixed", {"answer_rate": 0.94}, "fixed: accuracy of at least"),
        ("rft", {"accuracy": 0.64}, "rft is above fixed"),
    ],
)
def test_a_claim_fails_when_the_measurement_does(name, change, claim):
    by_name = results()
    by_name[name] = replace(by_name[name], **change)
    (only,) = failing(by_name)
    assert only.startswith(claim)


def test_arms_that_are_not_there_claim_nothing():
    assert list(checks({}, real=True)) == []
    assert [check.claim[:6] for check in checks({"broken": results()["broken"]}, real=True)] == ["broken"]


def test_the_comparison_says_what_all_arms_share_and_shows_nan_as_nan(tmp_path):
    """Of arms that were trained; the model as it was loaded has no settings of training."""
    shop = Workshop(tmp_path, REAL)
    (tmp_path / "guarded" / "nanproof").mkdir(parents=True)
    trained = [
        replace(results()[name], setting={"epochs": 3, "lr": lr, "model": REAL})
        for name, lr in (("broken", 2e-4), ("guarded", 4e-3))
    ]
    found = told(shop, [Result(name="unmodified", setting={"model": "x"}, ending="not trained"), *trained])
    assert found.settings == {"epochs": 3, "model": REAL}
    unmodified, broken, guarded = found.arms
    assert math.isnan(broken.values["grad_norm"]) and broken.values["nonfinite"] == "28/28" and broken.run is None
    assert guarded.run == "guarded/nanproof" and unmodified.values["nonfinite"] is None
    assert broken.setting == REPORTED[0].says and unmodified.setting == "the model as it was loaded"
    assert "| broken |" in found.table() and "nan" in found.table()
