"""The Trainer of transformers on a CUDA device, where verdicts come two steps late. `pytest -m gpu`."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from transformers import TrainerCallback

import nanproof
from integrations import tiny

pytestmark = pytest.mark.gpu
BAD = range(12, 16)


def without(rows, bad):
    return [row for i, row in enumerate(rows) if i not in bad]


def train(folder, model, rows, **settings):
    trainer = tiny.make_trainer(folder, model, rows, use_cpu=False, **settings)
    guard = nanproof.protect(trainer)
    trainer.train()
    return trainer, guard


@pytest.mark.parametrize("settings", [{}, {"bf16": True}, {"fp16": True}, {"gradient_accumulation_steps": 2}], ids=str)
def test_a_bad_batch_leaves_no_trace(tmp_path, settings):
    """With a real lag: steps behind the bad one are held and taken again through the trainer's own training step."""
    step = 4 * settings.get("gradient_accumulation_steps", 1)
    bad = range(3 * step, 4 * step)
    rows = tiny.feature_rows(8 * step, {bad[1]: math.nan})
    trainer, guard = train(tmp_path / "a", tiny.Regression(), rows, **settings)
    clean, other = train(tmp_path / "b", tiny.Regression(), without(tiny.feature_rows(8 * step), bad), **settings)
    assert tiny.same(tiny.weights(trainer.model), tiny.weights(clean.model))
    assert trainer.lr_scheduler.state_dict() == clean.lr_scheduler.state_dict()
    [incident] = guard.incidents
    assert (incident.step, incident.diagnosis.cause, incident.diagnosis.samples) == (3, "nonfinite-batch", (1,))
    assert guard.path.startswith("device")
    told = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [math.isnan(entry["loss"]) for entry in told] == [i == 3 for i in range(8)]
    # fp16 refuses a few more on both sides, while the loss scale finds its size.
    assert told[-1]["nanproof/skipped"] == guard.refused_so_far == other.refused_so_far + 1


def test_a_language_model_in_half_precision(tmp_path):
    """bf16 and dropout over a Llama: the same weights as without the batch, the cause found on the device. Attention is eager:
    the backward of the fused kernels adds in any order."""

    def run(name, rows):
        model = tiny.llama()
        model.set_attn_implementation("eager")
        return train(tmp_path / name, model, rows, bf16=True, logging_steps=20)

    trainer, guard = run("a", tiny.token_rows(40, BAD))
    clean, _ = run("b", without(tiny.token_rows(40), BAD))
    again, _ = run("c", without(tiny.token_rows(40), BAD))
    assert tiny.same(tiny.weights(again.model), tiny.weights(clean.model)), "not reproducible even without a bad batch"
    assert tiny.same(tiny.weights(trainer.model), tiny.weights(clean.model))
    [incident] = guard.incidents
    assert (incident.step, incident.diagnosis.cause) == (3, "no-supervised-targets")


def test_the_bad_batch_may_be_the_last(tmp_path):
    """Verdicts still under way when training ends are waited for."""
    trainer, guard = train(tmp_path, tiny.Regression(), tiny.feature_rows(16, {13: math.inf}))
    assert [i.step for i in guard.incidents] == [3] and tiny.all_finite(trainer.model)


def test_no_wait_beyond_the_trainers_own(tmp_path):
    """Steps without a log: as many host waits as the bare Trainer has with its NaN filter off."""

    class Count(TrainerCallback):
        def __init__(self):
            self.waits = 0

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 10:
                self.caught = warnings.catch_warnings(record=True)
                self.seen = self.caught.__enter__()
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
            if state.global_step == 30:
                torch.cuda.set_sync_debug_mode("default")
                self.caught.__exit__(None, None, None)
                self.waits = sum("synchroniz" in str(w.message) for w in self.seen)

    counts = {}
    for protect in (False, True):
        count = Count()
        trainer = tiny.make_trainer(
            tmp_path / str(protect), tiny.llama(), tiny.token_rows(160), use_cpu=False, bf16=True, logging_steps=1000,
            logging_nan_inf_filter=False, callbacks=[count],
        )  # fmt: skip
        if protect:
            nanproof.protect(trainer)
        trainer.train()
        counts[protect] = count.waits
    assert counts[True] <= counts[False], counts
