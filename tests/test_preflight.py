"""Preflight: what can be told before step 0, and silence over what is fine."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanproof
from zoo.plain import load
from zoo.registry import CASES

load()

FORETOLD = {
    "llama_given_shifted_labels": "labels-shifted-twice",
    "loss_shifts_what_the_dataset_shifted": "labels-shifted-twice",
    "latent_query_created_as_zeros": "normalize-zero-vector",
    "siren_without_the_frequency_in_its_init": "exploding-gradient",
    "layer_scale_never_initialised": "nonfinite-weights-at-start",
    "frozen_encoder_with_nan": "nonfinite-weights-at-start",
    "bert_with_new_special_tokens": "uninitialized-rows",
    "half_precision_lstm_under_adam": "fp16-optimizer-underflow",
    "adapters_in_half_under_a_scaler": "fp16-weights-with-grad-scaler",
    "total_variation_of_a_flat_picture": "sqrt-at-zero",
    "physics_loss_in_si_units": "gradient-norm-overflow",
    "bf16_cnn_at_a_small_rate": "bf16-update-rounding",
    "vocabulary_enlarged_after_the_optimizer": "optimizer-foreign-parameters",
    "encoder_cut_off_by_a_detach": "no-gradient-path",
    "reentrant_checkpoint_behind_a_frozen_stem": "no-gradient-path",
    "checkpoint_with_nan_statistics": "poisoned-buffer",
    "reward_only_for_the_exact_answer": "zero-advantage",
}
"""Cases of the zoo whose cause is there before the first step."""


def flight(t, batch=None):
    batch = next(iter(t.batches)) if batch is None else batch
    return nanproof.preflight(t.model, t.optimizer, batch, t.loss_fn, scaler=t.scaler, scheduler=t.scheduler, max_norm=t.max_norm)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(FORETOLD))
def test_what_is_there_from_the_start_is_found(name):
    assert FORETOLD[name] in [d.cause for d in flight(CASES[name].build(False))]


NAMES = sorted(CASES)
TWINS = [pytest.param(name, marks=() if i % 3 == 0 else pytest.mark.slow) for i, name in enumerate(NAMES)]
"""Every third in the ordinary run: each is probed, and some are rehearsed."""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TWINS)
def test_healthy_twins_pass(name):
    assert flight(CASES[name].build(True)) == []


class Tagger(nn.Module):
    def __init__(self, vocabulary=10, classes=4):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, 8), nn.Linear(8, classes)

    def forward(self, ids):
        return self.head(self.embed(ids))


def tags(model, batch):
    return F.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["labels"].flatten())


def tagging(**changes):
    torch.manual_seed(0)
    batch = {
        "ids": torch.randint(0, 10, (5, 7)),
        "labels": torch.randint(0, 4, (5, 7)),
        "attention_mask": torch.ones(5, 7, dtype=torch.long),
    }
    batch.update({k: v(batch[k].clone()) for k, v in changes.items()})
    model = Tagger()
    return model, torch.optim.AdamW(model.parameters(), 1e-3), batch


def put(row, column, value):
    def change(t):
        t[row, column] = value
        return t

    return change


def test_ids_and_labels_out_of_range_are_named_before_they_are_used():
    """On CUDA a lookup outside its table would end the device context; here the sample is named instead."""
    model, optimizer, batch = tagging(ids=put(2, 3, 10))
    (found,) = nanproof.preflight(model, optimizer, batch, tags)
    assert found.cause == "ids-out-of-range" and found.samples == (2,) and "the index 10 at [2, 3]" in found.evidence[0]
    model, optimizer, batch = tagging(labels=put(1, 0, 4))
    (found,) = nanproof.preflight(model, optimizer, batch, tags)
    assert found.cause == "ids-out-of-range" and "4 classes" in found.evidence[0]


def test_rows_without_targets_and_masks_that_empty_a_row():
    model, optimizer, batch = tagging(labels=put(3, slice(None), -100), attention_mask=put(1, slice(None), 0))
    found = {d.cause: d for d in nanproof.preflight(model, optimizer, batch, tags)}
    assert found["no-supervised-targets"].samples == (3,)
    assert found["attention-row-fully-masked"].samples == (1,)


def test_the_optimizers_parameters():
    """Held twice, left out, frozen, a learning rate of 0."""
    model, _, batch = tagging()
    with pytest.warns(UserWarning, match="duplicate"):
        twice = torch.optim.SGD([*model.head.parameters(), model.head.weight], 0.1)
    causes = {d.cause for d in nanproof.preflight(model, twice, batch, tags)}
    assert causes == {"duplicate-parameters", "parameters-not-optimized"}
    still = torch.optim.SGD(model.parameters(), 0.0)
    assert [d.cause for d in nanproof.preflight(model, still, batch, tags)] == ["learning-rate-zero"]


def test_fp16_headroom():
    """An output at 20,000 is finite, and one bad batch from 65504."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    with torch.no_grad():
        model.weight.fill_(5000.0)
    x = torch.ones(3, 4)

    def loss_fn(model, x):
        with torch.autocast("cpu", dtype=torch.float16):
            return model(x).float().mean() * 1e-6

    found = nanproof.preflight(model, torch.optim.AdamW(model.parameters(), 1.0), x, loss_fn)
    assert [d.cause for d in found] == ["fp16-activation-overflow"] and "2e+04" in found[0].evidence[0]


def test_nothing_is_changed():
    """Weights, optimizer state, gradients, mode and random numbers."""
    model, optimizer, batch = tagging()
    model.eval()
    tags(model, batch).backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()]))
    random = torch.get_rng_state()
    nanproof.preflight(model, optimizer, batch, tags)
    after = (model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()])
    assert str(before) == str(after) and torch.equal(random, torch.get_rng_state())
    assert not model.training


def test_bad_arguments():
    model, optimizer, batch = tagging()
    with pytest.raises(nanproof.UsageError, match=r"torch\.nn\.Module is needed"):
        nanproof.preflight(None, optimizer, batch, tags)
    with pytest.raises(nanproof.UsageError, match="loss_fn"):
        nanproof.preflight(model, optimizer, batch, None)
