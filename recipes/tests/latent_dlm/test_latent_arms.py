"""Arms of latent-dlm, and how they are measured: each differs from the report by what it says and by nothing else, and numbers
of an evaluation are those of a loop over its bytes."""

from __future__ import annotations

import math

import pytest
import torch

from latent_toys import ALONE, FRESH, prepared, small
from nanproof import UsageError
from nanproof_recipes.latent_dlm.arms import BROKEN, FIXED, GUARDED, PATCHED, SETTINGS, configured, setting
from nanproof_recipes.latent_dlm.config import KEYS, Config

pytest.importorskip("diffusers")

from nanproof_recipes.latent_dlm.model.diffusion import IGNORED, Noiser
from nanproof_recipes.latent_dlm.model.model import MMDiT
from nanproof_recipes.latent_dlm.train.evaluating import SEED, measure


def flat(config):
    return {f"{part}.{key}": value for part, keys in config.to_json().items() if part != "size" for key, value in keys.items()}


def changed(config, arm, chosen=frozenset()):
    before, after = flat(config), flat(configured(config, arm, chosen))
    return {key: after[key] for key in KEYS if after[key] != before[key]}


# -- what an arm changes -------------------------------------------------------------------------------------------------------


def test_the_fixed_arm_is_the_configuration_as_it_is_written():
    for size in ("tiny", "base"):
        assert changed(Config.load(size), FIXED) == {} and configured(Config.load(size), FIXED).size == size


def test_the_base_size_is_reported_with_other_values_than_are_recommended():
    wanted = {
        "optimizer.lr": 1e-4,
        "optimizer.grad_clip_norm": 1.0,
        "loss.latent_loss_weight": 1.0,
        "training.gradient_accumulation_steps": 1,
    }
    for arm in (BROKEN, GUARDED):
        assert changed(Config.load("base"), arm) == wanted and changed(Config.load("tiny"), arm) == {}


def test_the_document_arrives_at_what_it_recommends():
    """For the base size that is what the configuration says; for tiny it is as much less as it was there."""
    assert changed(Config.load("base"), PATCHED) in ({}, {"training.warmup_steps": 2000})
    tiny = Config.load("tiny")
    found = changed(tiny, PATCHED)
    assert found["optimizer.lr"] == tiny.optimizer.lr / 2 and found["optimizer.grad_clip_norm"] == 0.5
    assert found["loss.latent_loss_weight"] == 0.1 and found["training.gradient_accumulation_steps"] == 2


@pytest.mark.parametrize("off", [None, 0.0])
def test_clipping_that_is_off_becomes_1_in_the_documents_arm_alone(off):
    config = small(optimizer__grad_clip_norm=off)
    assert configured(config, PATCHED).optimizer.grad_clip_norm == 1.0
    for arm in (BROKEN, GUARDED, FIXED):
        assert configured(config, arm).optimizer.grad_clip_norm == off


def test_what_was_set_by_hand_stays():
    config = Config.load("base").with_(**{"optimizer.lr": 0.5, "training.gradient_accumulation_steps": 7})
    chosen = frozenset({"optimizer.lr", "training.gradient_accumulation_steps"})
    for arm in SETTINGS.values():
        found = configured(config, arm, chosen)
        assert found.optimizer.lr == 0.5 and found.training.gradient_accumulation_steps == 7


def test_guarded_is_broken_with_another_loop_and_no_other_difference():
    differ = {key for key, value in BROKEN.to_json().items() if GUARDED.to_json()[key] != value}
    assert differ == {"arm", "says", "loop", "heal"}
    assert {key for key, value in BROKEN.to_json().items() if PATCHED.to_json()[key] != value} == {
        "arm",
        "says",
        "loop",
        "losses",
    }


@pytest.mark.parametrize("name", ["", "Fixed", "fixed-seed-", "fixed-seed-x", "fixed-seed--1", "other-seed-1", "\x1b[31m"])
def test_an_arm_that_is_none_is_an_error(name):
    with pytest.raises(UsageError, match="unknown") as error:
        setting(name)
    assert "\x1b" not in str(error.value)


# -- how it is measured --------------------------------------------------------------------------------------------------------


def taught(seed=0):
    torch.manual_seed(seed)
    model = MMDiT(small().model)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn_like(p))
    return model


def slow(model, pairs, noiser, mode, size):
    """Byte by byte: cross entropy, accuracy, and squared error where a latent has noise."""
    generator = torch.Generator().manual_seed(SEED)
    entropy = right = bytes_ = square = numbers = 0.0
    for ids, latent in zip(pairs.ids.split(size), pairs.latents.split(size), strict=True):
        noised = noiser.draw({"ids": ids, "latent": latent}, generator, mode)
        with torch.no_grad():
            logits, predicted = model(*noised.inputs)
        for i, row in enumerate(noised.labels.tolist()):
            for j, label in enumerate(row):
                if label != IGNORED:
                    chances = torch.softmax(logits[i, j].double(), -1)
                    entropy -= math.log(chances[label].item())
                    right += int(chances.argmax()) == label
                    bytes_ += 1
            if noised.counts[i]:
                square += float((predicted[i].double() - noised.target[i].double()).square().sum())
                numbers += predicted[i].numel()
    return entropy / max(bytes_, 1), right / max(bytes_, 1), square / max(numbers, 1)


@pytest.mark.parametrize("padded", [False, True])
def test_an_evaluation_is_what_a_loop_over_bytes_says(padded):
    config, model = small(training__train_batch_size=1), taught()
    data, noiser = prepared(config, 20, padded), Noiser(config, padded)
    found = measure(model, data.train, noiser, config, None, ALONE)
    both, latent, text = (
        slow(model, data.train, noiser, mode, 4) for mode in ("unconditional", "text_to_latent", "latent_to_text")
    )
    assert (found.text_loss, found.text_accuracy, found.latent_loss) == pytest.approx(both, rel=1e-4)
    assert found.latent_loss_given_text == pytest.approx(latent[2], rel=1e-4)
    assert (found.text_loss_given_latent, found.text_accuracy_given_latent) == pytest.approx(text[:2], rel=1e-4)


def test_an_evaluation_is_the_same_every_time_and_touches_nothing():
    config, model = small(), taught()
    data, noiser = prepared(config), Noiser(config)
    state, before = torch.get_rng_state(), [p.detach().clone() for p in model.parameters()]
    for training in (True, False):
        model.train(training)
        first, second = (measure(model, data.valid, noiser, config, None, ALONE) for _ in range(2))
        assert first == second and first.finite and model.training is training
    assert torch.equal(torch.get_rng_state(), state) and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_that_are_not_finite_know_nothing(bad):
    """argmax takes NaN for the largest: where byte 0 is right, that would be an answer."""
    config, model = small(), taught()
    data = prepared(config)
    data.valid.ids.zero_()
    with torch.no_grad():
        model.text_out.out.weight.fill_(bad)
    found = measure(model, data.valid, Noiser(config), config, None, ALONE)
    assert found.text_accuracy == found.text_accuracy_given_latent == 0 and not math.isfinite(found.text_loss)
    assert not found.finite and math.isfinite(found.latent_loss)


def test_the_fresh_arm_of_these_tests_is_the_fixed_one_on_good_data():
    assert {key for key, value in FIXED.to_json().items() if FRESH.to_json()[key] != value} == {"damaged"}
