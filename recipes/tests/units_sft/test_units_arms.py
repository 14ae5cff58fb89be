"""The arms: each differs from `broken` by what it is about, and by nothing else."""

from __future__ import annotations

from dataclasses import fields

import pytest

from nanproof import UsageError
from nanproof_recipes.units_sft.arms import AS_REPORTED, BROKEN, FIXED, RFT, SETTINGS, TUNED, changed, setting

LABELS = {"arm", "variant", "says"}


def difference(one, other):
    """Settings in which two arms differ, apart from what they are called."""
    return {f.name: getattr(one, f.name) for f in fields(one) if getattr(one, f.name) != getattr(other, f.name)}


@pytest.mark.parametrize(
    ("arm", "variant", "expected"),
    [
        ("broken", "", {}),
        ("broken", "double", {"precision": "fp16-flag"}),
        ("broken", "prompt", {"weights": "fp32", "prompt": "ends-in-tag"}),
        ("patched", "000", {"patch": "000", "precision": "bf16-flag"}),
        ("patched", "001", {"weights": "fp32"}),
        ("patched", "002", {"patch": "002"}),
        ("guarded", "", {"protect": True, "heal": True}),
    ],
)
def test_a_variant_changes_what_its_document_changed_and_nothing_else(arm, variant, expected):
    found = {name: value for name, value in difference(setting(arm, variant), BROKEN).items() if name not in LABELS}
    assert found == expected


def test_the_arms_that_stand_beside_one_another():
    """A guarded arm and its twin share the learning rate, the batch and all that is not precision."""
    how = LABELS | {"weights", "precision", "optim", "heal"}
    assert set(difference(TUNED, FIXED)) - how == set() == set(difference(setting("guarded"), AS_REPORTED)) - how
    assert set(difference(AS_REPORTED, FIXED)) - LABELS == {"lr", "batch", "gradient_checkpointing"}
    assert set(difference(RFT, FIXED)) - LABELS == {"start", "lr", "batch", "epochs"} and RFT.start == FIXED.name
    assert FIXED.protect and not FIXED.heal and FIXED.weights == "fp32"


def test_names_are_those_of_folders_and_none_is_used_twice():
    assert setting("patched") == setting("patched", "000") and setting("patched").name == "patched-000"
    names = [s.name for s in SETTINGS.values()]
    assert len(set(names)) == len(names) and all(s.says for s in SETTINGS.values())
    assert all((s.arm, s.variant) == key for key, s in SETTINGS.items())
    assert setting("fixed").to_json()["lr"] == 4e-3


def test_changes_are_taken_and_none_is_left_out():
    found = setting("broken", epochs=1, lr=None, rank=8, seed=7, form="bare", precision="auto")
    assert difference(found, BROKEN) == {"epochs": 1, "rank": 8, "seed": 7, "form": "bare"}
    assert setting("fixed", precision="fp32").precision == "fp32"


@pytest.mark.parametrize(
    ("arm", "variant", "changes", "said"),
    [
        ("fxied", "", {}, "--arm fxied is unknown. Choose broken, patched, guarded or fixed"),
        ("rft", "", {}, "--arm rft is unknown. Choose broken, patched, guarded or fixed"),
        ("broken", "000", {}, "--arm broken has no variant '000': it has double, prompt"),
        ("fixed", "x", {}, "--arm fixed has no variant 'x': it has reported"),
        ("fixed", "", {"precision": "fp8"}, "--precision fp8 is unknown. Choose auto, bf16, fp16 or fp32"),
        ("broken", "", {"precision": "fp32"}, "--precision fp32: what --arm broken is held in is what the arm is about."),
        ("fixed", "", {"lr": 0.0}, "--lr 0.0: a number above 0 is needed"),
        ("fixed", "", {"lr": float("nan")}, "--lr nan: a number above 0 is needed"),
        ("fixed", "", {"batch": 0}, "--batch 0: a number of at least 1 is needed"),
        ("fixed", "", {"epochs": -1}, "--epochs -1: a number of at least 1 is needed"),
        ("fixed", "", {"rank": 0}, "--rank 0: a number of at least 1 is needed"),
        ("fixed", "", {"warmup": -1}, "--warmup -1: a number of at least 0 is needed"),
        ("fixed", "", {"seed": -1}, "--seed -1: a whole number from 0 to 2**32 - 1 is needed"),
        ("fixed", "", {"seed": 2**32}, "--seed 4294967296: a whole number from 0"),
        ("fixed", "", {"form": "long"}, "--form long is unknown. Choose bare, factor or worked"),
    ],
)
def test_what_cannot_be_is_said_in_a_sentence(arm, variant, changes, said):
    with pytest.raises(UsageError) as caught:
        setting(arm, variant, **changes)
    assert said in str(caught.value)


def test_rejection_sampling_is_changed_by_the_same_rules():
    assert changed(RFT, epochs=1).epochs == 1
    with pytest.raises(UsageError, match="--epochs 0"):
        changed(RFT, epochs=0)
