"""The settings of the arms: what differs between them, and every change that is refused with a word about what is needed."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
import torch

from nanproof import UsageError
from nanproof_recipes.arms import ARMS
from nanproof_recipes.machine import nonfinite_tensors
from nanproof_recipes.vlm_grpo.arms import SETTINGS, changed, setting
from nanproof_recipes.vlm_grpo.train import training
from nanproof_recipes.vlm_grpo.train.training import (
    Trained,
    chosen_precision,
    died,
    died_of_sampling,
    said,
    write_log,
)


def differences(a, b):
    a, b = asdict(a), asdict(b)
    return {key for key in a if a[key] != b[key]} - {"arm", "variant", "says"}


def test_the_arms_differ_by_what_they_say_and_by_nothing_else():
    broken = setting("broken")
    assert differences(broken, setting("patched")) == {"patched", "warmup"}
    assert differences(broken, setting("guarded")) == {"protect", "heal"}
    assert differences(setting("broken", "group"), setting("guarded", "group")) == {"protect", "heal"}
    assert differences(broken, setting("fixed")) == {"ban", "plain", "protect", "warmup", "max_norm", "precision"}
    assert differences(broken, setting("broken", "group")) == {"trainer", "ban", "batch", "group"}
    assert {arm for arm, _ in SETTINGS} == set(ARMS)


def test_a_name_tells_arm_variant_and_seed():
    assert setting("fixed").name == "fixed" and setting("broken", "group").name == "broken-group"
    assert setting("guarded", "group", seed=2).name == "guarded-group-seed-2"
    assert json.loads(json.dumps(setting("fixed").to_json()))["max_norm"] == 0.5


def test_what_is_none_is_left_as_it_was():
    assert setting("fixed", lr=None, steps=None, trainer=None) == setting("fixed")
    assert changed(setting("fixed"), lr=0.5, steps=None).lr == 0.5


REFUSED = {
    "lr of 0": ({"lr": 0.0}, "--lr 0.0: a number above 0"),
    "lr below 0": ({"lr": -1e-3}, "--lr -0.001: a number above 0"),
    "lr of NaN": ({"lr": math.nan}, "--lr nan: a number above 0"),
    "lr of Inf": ({"lr": math.inf}, "--lr inf: a number above 0"),
    "norm of 0": ({"max_norm": 0.0}, "--max-norm 0.0: a number above 0"),
    "temperature of 0": ({"temperature": 0.0}, "--temperature 0.0: a number above 0"),
    "temperature of Inf": ({"temperature": math.inf}, "--temperature inf: a number above 0"),
    "no batch": ({"batch": 0}, "--batch 0: a number of at least 1"),
    "no steps": ({"steps": 0}, "--steps 0: a number of at least 1"),
    "warm-up below 0": ({"warmup": -1}, "--warmup -1: a number of at least 0"),
    "no rank": ({"rank": 0}, "--rank 0: a number of at least 1"),
    "no alpha": ({"alpha": 0}, "--alpha 0: a number of at least 1"),
    "beta below 0": ({"beta": -0.1}, "--beta -0.1: a number of at least 0"),
    "beta of NaN": ({"beta": math.nan}, "--beta nan: a number of at least 0"),
    "beta of Inf": ({"beta": math.inf}, "--beta inf: a number of at least 0"),
    "group of one": ({"group": 1}, "--group 1: a group of one has no mean to differ from"),
    "group of none": ({"group": 0}, "--group 0: a group of one has no mean"),
    "not whole groups": ({"batch": 12, "group": 8}, "--batch 12: replies do not divide into groups of 8"),
    "another trainer": ({"trainer": "\x1b[2Jppo"}, r"--trainer \\x1b\[2Jppo is unknown. Choose trl or loop"),
    "another precision": ({"precision": "fp16"}, "--precision fp16 is unknown. Choose as-loaded, auto, bf16 or fp32"),
    "seed below 0": ({"seed": -1}, "--seed -1: a whole number from 0"),
    "seed too large": ({"seed": 2**32}, "--seed 4294967296: a whole number from 0"),
}


@pytest.mark.parametrize(("changes", "said"), REFUSED.values(), ids=list(REFUSED))
def test_a_setting_that_cannot_be_is_refused(changes, said):
    with pytest.raises(UsageError, match=said):
        setting("fixed", **changes)
    with pytest.raises(UsageError, match=said):
        changed(setting("broken"), **changes)


@pytest.mark.parametrize(
    ("arm", "variant", "said"),
    [
        ("best\x07", "", r"--arm best\\x07 is unknown. Choose broken, patched, guarded or fixed"),
        ("fixed", "group", "--arm fixed has no variant 'group': it has none"),
        ("broken", "x", "--arm broken has no variant 'x': it has group"),
    ],
)
def test_an_unknown_arm_or_variant_is_told_the_known_ones(arm, variant, said):
    with pytest.raises(UsageError, match=said):
        setting(arm, variant)


def test_the_groups_of_one_stay_of_one_and_in_the_loop():
    """`--trainer` is for a whole comparison: this arm has no choice. A trainer that is none is an error here too."""
    assert setting("broken", "group", trainer="trl").trainer == "loop"
    assert setting("broken", "group", group=1, batch=7).batch == 7
    with pytest.raises(UsageError, match="--group 4: broken-group is about groups of one"):
        setting("broken", "group", group=4)
    with pytest.raises(UsageError, match="--trainer ppo is unknown"):
        setting("guarded", "group", trainer="ppo")


# -- what a training came to -----------------------------------------------------------------------------------------------------


def test_fp16_is_never_chosen_for_there_is_no_loss_scale(monkeypatch):
    """Not where it is asked for, and not where a device has nothing else: that one trains in fp32."""
    model = torch.nn.Linear(2, 2)
    assert chosen_precision(model, "auto").name == chosen_precision(model, "fp32").name == "fp32"
    with pytest.raises(UsageError, match="--precision fp16 is unknown"):
        chosen_precision(model, "fp16")

    def old_gpu(model, place, ask):
        from nanproof.numerics.precision import Device, precision_for

        return precision_for(Device("cuda", False, "an old GPU"), ask)

    monkeypatch.setattr(training, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(training, "choose", old_gpu)
    assert old_gpu(model, None, "auto").name == "fp16" and chosen_precision(model, "auto").name == "fp32"


def test_steps_with_nan_are_counted_and_the_log_is_json(tmp_path):
    log = [
        {"step": 0, "loss": 0.5, "grad_norm": 1.0},
        {"step": 1, "loss": math.nan},
        {"step": 2, "loss": 0.0, "grad_norm": math.inf},
    ]
    trained = Trained(None, setting("fixed"), log=log)
    assert trained.nonfinite_steps == 2 and trained.last("reward") is None
    assert trained.last("grad_norm") == math.inf and Trained(None, setting("fixed"), log=log[:1]).last("loss", 5) == 0.5
    lines = [json.loads(line) for line in write_log(tmp_path, log).read_text().splitlines()]
    assert lines[0] == log[0] and [line["step"] for line in lines] == [0, 1, 2] and lines[1]["loss"] != 0.5


def test_weights_with_nan_are_counted_among_those_that_learn():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[0].requires_grad_(False)
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
        model[1].bias[1] = -math.inf
    assert nonfinite_tensors(model) == (1, 2)


def test_only_the_reported_death_is_taken_for_it():
    with pytest.raises(RuntimeError) as error:
        torch.multinomial(torch.tensor([math.nan, 1.0]), 1)
    assert died_of_sampling(error.value) and not died_of_sampling(RuntimeError("out of memory"))
    trained = Trained(None, setting("broken"))
    died(trained, error.value)
    assert trained.ending.startswith("raised RuntimeError: probability tensor") and not trained.device_lost
    on_cuda = RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be ...")
    assert died_of_sampling(on_cuda)
    died(trained, on_cuda)
    assert trained.ending == "raised RuntimeError: CUDA error: device-side assert triggered" and trained.device_lost
    assert not died_of_sampling(ValueError("probability tensor"))
    assert said({"reward": 1.2345, "loss": 2.0, "kl": math.nan}) == "reward 1.23, kl nan"
