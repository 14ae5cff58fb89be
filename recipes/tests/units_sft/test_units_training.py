"""The arms, trained on the tiny model in fp16 as reported: how each of them ends, and that it ends so every time."""

from __future__ import annotations

import json
import math
import os
from contextlib import contextmanager

import pytest
import torch

from nanproof import UsageError, read_steps
from nanproof_recipes import machine
from nanproof_recipes.progress import Progress
from nanproof_recipes.units_sft import training
from nanproof_recipes.units_sft.arms import FIXED, setting
from nanproof_recipes.units_sft.asking import measured_loss
from nanproof_recipes.units_sft.data.samples import IGNORED, examples
from nanproof_recipes.units_sft.models import tiny
from nanproof_recipes.units_sft.workshop import Workshop
from units_small import TRAIN, VALID


def exact(result, *but):
    """All that was measured, to the last digit and with its NaNs, as text; not how long it took."""
    return json.dumps({k: v for k, v in result.to_json().items() if k not in ("seconds", *but)}, sort_keys=True)


def untrained(shop):
    """The held-out loss of the model as it was loaded."""
    rows = examples(shop.language, shop.sets["valid"], FIXED)
    return measured_loss(tiny().model, rows, shop.language.tokenizer.pad_token_id)


# -- the arms --------------------------------------------------------------------------------------------------------------------


def test_broken_ends_with_a_nan_norm_a_loss_of_zero_and_no_adapter_left(shop):
    """The symptom of the reports. The loss that was logged is 0.0; the loss that is measured is NaN."""
    found = shop.arm(setting("broken"))
    assert found.ending == "finished" and found.steps == 6
    assert math.isnan(found.grad_norm) and found.loss == 0.0 and math.isnan(found.valid_loss)
    assert found.nonfinite == found.tensors == 28
    assert found.accuracy == found.answer_rate == 0.0
    assert math.isfinite(found.curves["loss"][0]) and found.curves["loss"][0] > 1
    assert any("hidden-nan" in note for note in found.notes)


def test_the_patch_of_document_000_passes_its_own_checks_and_hides_the_nan(shop):
    """Its loss is invented in every step but the first, and its callback looks where there are no gradients."""
    found = shop.arm(setting("patched", "000"))
    assert found.nonfinite == found.tensors and math.isnan(found.valid_loss) and found.accuracy == 0.0
    assert found.loss == pytest.approx(1e-6) and math.isfinite(found.grad_norm)
    assert "the loss was replaced by 1e-6 in 5 of 6 steps" in found.notes
    assert "its callback found 0 gradients to look at in on_step_end" in found.notes
    assert "the checks that document 000 names pass after the first step" in found.notes


def test_the_patch_of_document_002_changes_not_one_digit(shop):
    broken, patched = shop.arm(setting("broken")), shop.arm(setting("patched", "002"))
    assert json.dumps(patched.to_json()["curves"]) == json.dumps(broken.to_json()["curves"])
    assert exact(patched, "name", "setting") == exact(broken, "name", "setting")


def test_the_patch_of_document_001_trains(shop):
    found = shop.arm(setting("patched", "001"))
    assert found.nonfinite == 0 and math.isfinite(found.valid_loss) and math.isfinite(found.grad_norm)
    assert found.valid_loss < untrained(shop)


def test_guarded_finds_the_cause_heals_it_and_skips_nothing(shop):
    found = shop.arm(setting("guarded"))
    (incident,) = found.incidents
    assert incident["diagnosis"]["cause"] == "fp16-optimizer-underflow" and incident["diagnosis"]["verified"] is True
    assert incident["remedy"] and incident["action"] == "healed" and incident["step"] == 0
    assert (found.refused, found.skipped, found.rolled_back) == (1, 0, 0)
    assert found.ending == "finished" and found.nonfinite == 0
    assert math.isfinite(found.grad_norm) and math.isfinite(found.valid_loss)


def test_guarded_comes_out_where_fixed_does(shop):
    """With the same learning rate and batch: a healed run has lost nothing of what `fixed` has learned."""
    healed, right = shop.arm(setting("guarded", "tuned")), shop.arm(setting("fixed"))
    assert healed.steps == right.steps and len(healed.incidents) == 1 and healed.skipped == 0
    assert healed.valid_loss == pytest.approx(right.valid_loss, rel=0.02)
    assert right.valid_loss < 0.9 * untrained(shop)


def test_fixed_has_nothing_to_tell(shop):
    found = shop.arm(setting("fixed"))
    assert found.ending == "finished" and found.steps == 15 == len(
        list(read_steps(shop.out / "fixed" / "nanproof" / "steps.jsonl"))
    )
    assert not found.incidents and (found.refused, found.skipped, found.rolled_back, found.nonfinite) == (0, 0, 0, 0)
    assert found.curves["loss"][-1] < found.curves["loss"][0]
    assert "doctor on its log: nothing wrong" in found.notes and any(note.startswith("precision: ") for note in found.notes)


def test_fixed_steps_with_the_fused_optimizer_over_fp32_weights(language, tmp_path, monkeypatch):
    """And `broken` with the loop over tensors in fp16, in which eps is 0."""
    seen = {}
    told = training._Bar.on_step_end

    def look(self, args, state, control, **kwargs):
        groups, dtypes = kwargs["optimizer"].param_groups, {p.dtype for p in kwargs["model"].parameters() if p.requires_grad}
        seen[args.output_dir.split("/")[-2]] = {group.get("fused") for group in groups}, dtypes
        told(self, args, state, control, **kwargs)

    monkeypatch.setattr(training._Bar, "on_step_end", look)
    rows = examples(language, Workshop(tmp_path, "tiny", train=4, valid=1).sets["train"], FIXED)
    for arm in ("fixed", "broken"):
        training.train(tiny(), rows, setting(arm, epochs=1, batch=4), tmp_path / arm)
    assert seen["fixed"] == ({True}, {torch.float32})
    assert seen["broken"][0] in ({None}, {False}) and seen["broken"][1] == {torch.float16}


# -- the same every time ---------------------------------------------------------------------------------------------------------


def another(shop, folder, progress=None):
    return Workshop(folder, "tiny", train=TRAIN, valid=VALID, progress=progress)


def test_one_seed_gives_one_result_and_another_seed_another(shop, tmp_path):
    """To the last digit: losses, norms, curves, replies."""
    once = shop.arm(setting("fixed"))
    torch.manual_seed(12345)  # what came before has no say
    assert exact(another(shop, tmp_path / "same").arm(setting("fixed"))) == exact(once)
    other = another(shop, tmp_path / "other").arm(setting("fixed", seed=1))
    assert other.valid_loss != once.valid_loss and other.curves["loss"] != once.curves["loss"]


class StopsAt(Progress):
    """Somebody presses Ctrl-C when the training is that far."""

    def __init__(self, step):
        super().__init__()
        self.step = step

    @contextmanager
    def of(self, name, total):
        def advance(done, said=""):
            if name.startswith("train") and done == self.step:
                raise KeyboardInterrupt

        yield advance


@pytest.mark.parametrize(("arm", "variant", "step"), [("fixed", "", 3), ("fixed", "", 13), ("guarded", "tuned", 13)])
def test_an_arm_that_was_interrupted_goes_on_and_ends_the_same(shop, tmp_path, arm, variant, step):
    """At step 3 there is no checkpoint yet, at 13 there is one; the result is that of the arm without an interruption. A healed
    one goes on healed."""
    asked = setting(arm, variant)
    whole = shop.arm(asked)
    with pytest.raises(KeyboardInterrupt):
        another(shop, tmp_path, StopsAt(step)).arm(asked)
    assert not (tmp_path / asked.name / "result.json").exists()
    found = another(shop, tmp_path).arm(asked)
    went_on = [note for note in found.notes if note.startswith("went on from ")]
    assert went_on == (["went on from checkpoint-10; seconds are counted from there"] if step == 13 else [])
    assert exact(found, "notes", "incidents") == exact(whole, "notes", "incidents")
    assert [note for note in found.notes if note not in went_on] == list(whole.notes)
    assert [i["kind"] for i in found.incidents] == [i["kind"] for i in whole.incidents]
    weights = [(folder / asked.name / "adapter" / "adapter_model.safetensors").read_bytes() for folder in (shop.out, tmp_path)]
    assert weights[0] == weights[1]
    assert not (tmp_path / asked.name / "trainer").exists()


# -- around the training ---------------------------------------------------------------------------------------------------------


def test_a_sample_without_supervised_tokens_is_refused_before_anything_is_trained(language, tmp_path):
    rows = examples(language, Workshop(tmp_path, "tiny", train=4, valid=1).sets["train"], FIXED)
    rows[2] = {**rows[2], "labels": [IGNORED] * len(rows[2]["labels"])}
    with pytest.raises(UsageError, match=r"1 of 4 samples have no supervised token: 2"):
        training.train(tiny(), rows, FIXED, tmp_path / "fixed")
    assert not (tmp_path / "fixed").exists()


def test_an_error_that_the_setting_is_known_for_is_an_ending_and_another_is_an_error(language, tmp_path):
    """Labels of another length than their tokens, which is a ValueError. With fp16=True over fp16 weights it is the result."""
    rows = examples(language, Workshop(tmp_path, "tiny", train=4, valid=1).sets["train"], FIXED)
    rows[1]["labels"] = [IGNORED, *rows[1]["labels"]] * 9
    with pytest.raises(ValueError) as caught:
        training.train(tiny(), rows, setting("broken", epochs=1, batch=4), tmp_path / "broken")
    found = training.train(tiny(), rows, setting("broken", "double", epochs=1, batch=4), tmp_path / "double")
    assert found.ending == f"raised ValueError: {caught.value}"
    assert found.steps == 0 and found.last("loss") is None


@pytest.mark.parametrize("before", [False, True])
def test_every_flag_is_put_back(monkeypatch, before):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    deterministic = torch.utils.deterministic

    def flags():
        enabled, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
        return enabled, warns, deterministic.fill_uninitialized_memory, os.environ.get("CUBLAS_WORKSPACE_CONFIG")

    was = flags()
    try:
        torch.use_deterministic_algorithms(before, warn_only=False)
        outside = flags()
        with pytest.raises(KeyError), machine.reproducible():
            assert flags() == (True, True, False, ":4096:8")
            raise KeyError
        assert flags() == outside
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])


def test_a_workspace_that_the_user_chose_is_left(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with machine.reproducible():
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
