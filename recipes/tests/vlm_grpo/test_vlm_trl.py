"""GRPO by TRL: the reported death, what the guard leaves of it, and a TRL that this was not written for."""

from __future__ import annotations

import math
import random

import pytest
import torch

pytest.importorskip("trl.trainer")
pytest.importorskip("datasets")

from nanproof import UnsupportedError
from nanproof_recipes.machine import nonfinite_tensors
from nanproof_recipes.vlm_grpo.arms import setting
from nanproof_recipes.vlm_grpo.models import VERDICT
from nanproof_recipes.vlm_grpo.train import grpo_trl
from nanproof_recipes.vlm_grpo.train.grpo_trl import train, usable
from nanproof_recipes.vlm_grpo.train.rewards import reward


def run(vlm, tmp_path, arm, **changes):
    found = setting(arm, **{"steps": 2, "batch": 16, "group": 4, "warmup": 1, "rank": 4, "alpha": 8, **changes})
    return train(vlm.seeing(), vlm.train, found, tmp_path, lambda done, said: None)


# -- the arms --------------------------------------------------------------------------------------------------------------------


def test_broken_dies_with_the_reported_error_after_one_step(vlm, tmp_path):
    """The loss that TRL logs is 0.0; its norm is NaN and every adapter is."""
    trained = run(vlm, tmp_path, "broken")
    assert trained.ending == "raised RuntimeError: probability tensor contains either `inf`, `nan` or element < 0"
    assert trained.steps == len(trained.log) == trained.nonfinite_steps == 1 and math.isnan(trained.log[0]["grad_norm"])
    assert nonfinite_tensors(trained.model) == (42, 42)
    assert trained.nonfinite == 42, "known before the next sampling, which on CUDA takes the device with it"


def test_guarded_records_one_incident_and_keeps_every_weight_finite(vlm, tmp_path):
    trained = run(vlm, tmp_path, "guarded", steps=3)
    assert trained.ending == "finished" and trained.steps == 3 and trained.nonfinite_steps == 0
    assert [(i.action, i.diagnosis.cause) for i in trained.incidents] == [("recorded", "exp-overflow")]
    assert (trained.refused, trained.skipped, trained.rolled_back, trained.bad_rows) == (0, 0, 0, 0)
    assert nonfinite_tensors(trained.model) == (0, 42) and (tmp_path / "nanproof").is_dir()


def test_fixed_has_no_incident_and_logs_every_step(vlm, tmp_path, monkeypatch):
    """The judge's verdict is behind each reply and does not count; rewards are of the reply alone."""
    rollouts, ticks = [], []
    made = grpo_trl._rollout

    def kept(seeing, scenes):
        rollout = made(seeing, scenes)

        def wrapped(prompts, trainer):
            rollouts.append((prompts, rollout(prompts, trainer)))
            return rollouts[-1][1]

        return wrapped

    monkeypatch.setattr(grpo_trl, "_rollout", kept)
    found = setting("fixed", steps=2, batch=16, group=4, rank=4, alpha=8)
    trained = train(vlm.seeing(), vlm.train, found, tmp_path, lambda done, said: ticks.append(done))
    assert trained.ending == "finished" and not trained.incidents and trained.skipped == trained.bad_rows == 0
    assert [line["step"] for line in trained.log] == [0, 1] and ticks == [1, 2]
    assert all(math.isfinite(x) for line in trained.log for x in line.values())
    assert set(trained.log[0]) == {"step", "loss", "reward", "reward_std", "kl", "entropy", "grad_norm"}
    mark = vlm.warm.token(VERDICT)
    for line, (prompts, out) in zip(trained.log, rollouts, strict=True):
        asked = [vlm.train[prompt[0]["scene"]] for prompt in prompts]
        rewards = [reward(text, scene) for text, scene in zip(out["said"], asked, strict=True)]
        assert line["reward"] == pytest.approx(sum(rewards) / 16, abs=1e-5)
        for ids, counts, text in zip(out["completion_ids"], out["env_mask"], out["said"], strict=True):
            own = counts.index(0)
            assert counts == [1] * own + [0] * (len(ids) - own) and ids.index(mark) == own and len(ids) == own + 2
            assert vlm.warm.tokenizer.decode(ids[:own], skip_special_tokens=True) == text


def test_a_row_that_sampling_had_to_end_is_counted_once(vlm, tmp_path):
    """The head gives NaN for row 1 at the first token that is asked for. What TRL logs is the count so far, at every step."""
    seeing, left = vlm.seeing(), [1]

    def spoil(module, args, out):
        if left and not torch.is_grad_enabled() and out.shape[1] == 1:
            left.pop()
            out = out.clone()
            out[1] = math.nan
        return out

    seeing.model.lm_head.register_forward_hook(spoil)
    found = setting("fixed", steps=3, batch=16, group=4, rank=4, alpha=8)
    trained = train(seeing, vlm.train, found, tmp_path, lambda done, said: None)
    assert trained.ending == "finished" and trained.bad_rows == 1 and trained.nonfinite_steps == 0
    assert [(i.kind, i.action, i.step) for i in trained.incidents] == [("generation", "recorded", 0)]


def test_rows_of_a_generation_that_ends_the_run_are_counted(vlm, tmp_path):
    """No row can be sampled from the first token on, so the run halts before anything is logged."""
    seeing = vlm.seeing()
    seeing.model.lm_head.register_forward_hook(lambda module, args, out: out if torch.is_grad_enabled() else out * math.nan)
    found = setting("fixed", steps=3, batch=16, group=4, rank=4, alpha=8)
    trained = train(seeing, vlm.train, found, tmp_path, lambda done, said: None)
    assert trained.ending.startswith("halted: ") and "no row of a generation could be sampled" in trained.ending
    assert (trained.steps, trained.log, trained.bad_rows) == (0, [], 16)


def test_the_patch_goes_on_hides_the_nan_and_its_callback_sees_nothing(vlm, tmp_path):
    trained = run(vlm, tmp_path, "patched")
    assert trained.ending == "finished" and trained.steps == 2 == trained.nonfinite_steps and trained.bad_rows > 0
    assert [line["loss"] for line in trained.log] == [0.0, 0.0] and nonfinite_tensors(trained.model) == (42, 42)
    assert trained.notes[0].startswith("its processor replaced NaN at ")
    assert trained.notes[1] == "its callback found 0 gradients to look at in on_step_end"


# -- another TRL -----------------------------------------------------------------------------------------------------------------


def test_this_trl_is_usable():
    usable()


@pytest.mark.parametrize("name", grpo_trl.NEEDED)
def test_a_trl_with_another_signature_is_refused_before_anything_is_begun(vlm, tmp_path, monkeypatch, name):
    import trl

    def changed(self, something, else_):
        raise AssertionError("never called")

    monkeypatch.setattr(trl.GRPOTrainer, name, changed)
    before = torch.get_rng_state(), random.getstate()
    with pytest.raises(UnsupportedError, match=rf"TRL {trl.__version__}: GRPOTrainer\.{name}\(prompt.*--trainer loop"):
        run(vlm, tmp_path, "fixed")
    assert not list(tmp_path.iterdir()) and torch.equal(torch.get_rng_state(), before[0]) and random.getstate() == before[1]


def test_a_trl_without_the_method_is_refused(monkeypatch):
    import trl

    monkeypatch.delattr(trl.GRPOTrainer, "_tokenize_prompts")
    with pytest.raises(UnsupportedError, match=r"_tokenize_prompts\(prompts\) is needed and not there"):
        usable()


def test_another_error_is_not_taken_for_the_reported_one(vlm, tmp_path, monkeypatch):
    def fails(*args):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(grpo_trl, "verdict", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(vlm, tmp_path, "broken")
