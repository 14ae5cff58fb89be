"""The Trainer of transformers, protected: the same bad batch with and without, in real runs."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback

import forked
import nanproof
from integrations.tiny import Regression, all_finite, feature_rows, llama, make_trainer, same, token_rows, weights
from nanproof import Policy, TrainingHalted, UsageError
from nanproof.integrations import _versions as versions
from nanproof.integrations.transformers import (
    ActivationMonitorCallback,
    GradientMonitorCallback,
    GradientMonitoringCallback,
    LossCheckCallback,
)

BAD = range(12, 16)
"""Batch 3 of 4 rows each: without a label, the loss is 0/0."""


def without(rows, bad):
    return [row for i, row in enumerate(rows) if i not in bad]


def test_without_protection_the_weights_are_lost_and_the_log_hides_it(tmp_path):
    """What the Trainer does by itself: a NaN feature reaches every weight, and the log says 0.0."""
    trainer = make_trainer(tmp_path, Regression(), feature_rows(32, {13: math.nan}))
    trainer.train()
    assert not all_finite(trainer.model)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[3:] == [0.0] * 5


def test_with_protection_the_batch_leaves_no_trace(tmp_path):
    """Weights, buffers and schedule end as if the bad batch had never been there, bit for bit; the incident names it."""
    trainer = make_trainer(tmp_path / "a", Regression(), feature_rows(32, {13: math.nan}))
    guard = nanproof.protect(trainer)
    trainer.train()
    clean = make_trainer(tmp_path / "b", Regression(), without(feature_rows(32), BAD))
    nanproof.protect(clean)
    clean.train()
    assert same(weights(trainer.model), weights(clean.model))
    assert trainer.lr_scheduler.state_dict() == clean.lr_scheduler.state_dict()
    [incident] = guard.incidents
    assert (incident.step, incident.kind, incident.action) == (3, "nonfinite-loss", "skipped")
    assert incident.diagnosis.cause == "nonfinite-batch"
    assert incident.diagnosis.samples == (1,)
    assert Path(incident.bundle).is_dir()
    assert [record.step for record in guard.history] == list(range(8))


@pytest.mark.parametrize("logging_steps", [1, 3, 100])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_with_a_lag_steps_behind_the_bad_one_are_taken_again(tmp_path, logging_steps, accumulation):
    """As on CUDA, where verdicts come two steps late: held, then taken through the trainer's own training step."""
    size, made = 4 * accumulation, []
    bad = range(3 * size, 4 * size)
    for name, rows in (("a", token_rows(10 * size, bad)), ("b", without(token_rows(10 * size), bad))):
        trainer = make_trainer(
            tmp_path / name, llama(), rows, logging_steps=logging_steps, gradient_accumulation_steps=accumulation
        )
        guard = nanproof.protect(trainer, policy=Policy(lag=2))
        trainer.train()
        made.append((weights(trainer.model), trainer.lr_scheduler.state_dict(), guard))
    assert same(made[0][0], made[1][0]) and made[0][1] == made[1][1]
    assert [i.step for i in made[0][2].incidents] == [3]
    assert [record.step for record in made[0][2].history] == list(range(10))


def test_a_batch_without_a_label_is_explained(tmp_path):
    """The failure behind many a `loss 0.0`: the cause has its name, and its fix was verified on the bad step."""
    trainer = make_trainer(tmp_path, llama(), token_rows(32, BAD))
    guard = nanproof.protect(trainer)
    trainer.train()
    [incident] = guard.incidents
    assert incident.step == 3 and incident.diagnosis.cause == "no-supervised-targets" and incident.diagnosis.verified
    assert all_finite(trainer.model)


def lora(model):
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


@pytest.mark.parametrize(
    ("wrap", "settings"),
    [
        (None, {"bf16": True}),
        (None, {"label_smoothing_factor": 0.1}),
        (None, {"gradient_checkpointing": True}),
        (None, {"max_grad_norm": 0.0}),
        (None, {"optim": "adafactor"}),
        (None, {"optim": "sgd"}),
        (None, {"torch_compile": True, "torch_compile_backend": "eager"}),
        (lora, {}),
    ],
    ids=["bf16", "label-smoothing", "checkpointing", "no-clipping", "adafactor", "sgd", "compiled", "lora"],
)
def test_the_batch_leaves_no_trace_whatever_the_settings(tmp_path, wrap, settings):
    """The same in half precision, with smoothed labels, checkpointed activations, other optimizers, adapters."""
    made = []
    for name, rows in (("a", token_rows(24, BAD)), ("b", without(token_rows(24), BAD))):
        model = llama() if wrap is None else wrap(llama())
        trainer = make_trainer(tmp_path / name, model, rows, **settings)
        guard = nanproof.protect(trainer)
        trainer.train()
        made.append((weights(model), guard))
    assert same(made[0][0], made[1][0])
    [incident] = made[0][1].incidents
    assert incident.step == 3 and incident.diagnosis.cause == "no-supervised-targets"
    assert not made[1][1].incidents


@pytest.mark.parametrize("accumulation", [2, 3])
def test_accumulated_steps_are_refused_whole_and_name_the_micro_batch(tmp_path, accumulation):
    """One NaN feature in one micro-batch: its whole step goes, and what is kept equals a run without that step's rows."""
    size = 4 * accumulation
    bad_row = size + 5  # step 1, micro-batch 1, row 1
    trainer = make_trainer(
        tmp_path / "a", Regression(), feature_rows(4 * size, {bad_row: math.inf}), gradient_accumulation_steps=accumulation
    )
    guard = nanproof.protect(trainer)
    trainer.train()
    clean = make_trainer(
        tmp_path / "b",
        Regression(),
        without(feature_rows(4 * size), range(size, 2 * size)),
        gradient_accumulation_steps=accumulation,
    )
    nanproof.protect(clean)
    clean.train()
    assert same(weights(trainer.model), weights(clean.model))
    [incident] = guard.incidents
    assert (incident.step, incident.micro_batch, incident.diagnosis.samples) == (1, 1, (1,))
    assert incident.diagnosis.cause == "nonfinite-batch"


def test_the_replayed_loss_is_the_one_of_the_run(tmp_path):
    """The loss function for replays repeats what `training_step` gave to backward, with a remainder of micro-batches too."""
    trainer = make_trainer(tmp_path, llama(dropout=0.0), token_rows(28), gradient_accumulation_steps=3, max_steps=3)
    guard = nanproof.protect(trainer)
    seen = []

    class Compare(TrainerCallback):
        def on_optimizer_step(self, args, state, control, **kwargs):
            (attempt,) = guard.engine.under_way.pending
            with torch.no_grad():  # after the optimizer's step, so on other weights: put them back first
                now = weights(trainer.model)
                trainer.model.load_state_dict(self.before)
                again = sum(float(guard.engine.loss_fn(trainer.model, batch)) for batch in attempt.batches)
                trainer.model.load_state_dict(now)
            seen.append((again, float(attempt.report.loss), len(attempt.batches)))

        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            self.before = weights(trainer.model)

    trainer.add_callback(Compare())
    trainer.train()
    assert [count for *_, count in seen] == [3, 3, 1]
    for again, was, _ in seen:
        assert again == pytest.approx(was, rel=1e-6)


def test_when_nothing_is_wrong_nothing_is_different(tmp_path):
    """Without clipping bit for bit; with it within the rounding of one multiplication. The Trainer's own log is the same."""
    runs = {}
    for protect in (False, True):
        for norm in (0.0, 1.0):
            trainer = make_trainer(tmp_path / f"{protect}{norm}", llama(), token_rows(24), max_grad_norm=norm)
            if protect:
                nanproof.protect(trainer)
            trainer.train()
            runs[protect, norm] = weights(trainer.model), trainer.state.log_history
    assert same(runs[False, 0.0][0], runs[True, 0.0][0])
    for name, tensor in runs[False, 1.0][0].items():
        torch.testing.assert_close(runs[True, 1.0][0][name], tensor, rtol=0, atol=2e-7)
    for plain, told in zip(runs[False, 0.0][1][:-1], runs[True, 0.0][1][:-1], strict=True):
        ours = {key: value for key, value in told.items() if not key.startswith("nanproof/")}
        assert ours.pop("grad_norm") == pytest.approx(plain.pop("grad_norm"), rel=1e-6)  # another order of summation
        assert ours == plain


def test_the_log_tells_the_truth(tmp_path):
    """A window's loss is the mean over its finite steps, NaN if there is none, and the windows after it are not touched."""
    rows = token_rows(32, BAD)
    every = make_trainer(tmp_path / "a", llama(), rows)
    nanproof.protect(every)
    every.train()
    losses = [entry["loss"] for entry in every.state.log_history if "loss" in entry]
    assert math.isnan(losses[3]) and all(math.isfinite(x) for i, x in enumerate(losses) if i != 3)
    assert [e["nanproof/skipped"] for e in every.state.log_history if "loss" in e] == [0, 0, 0, 1, 1, 1, 1, 1]
    windows = make_trainer(tmp_path / "b", llama(), rows, logging_steps=4)
    nanproof.protect(windows)
    result = windows.train()
    told = [entry["loss"] for entry in windows.state.log_history if "loss" in entry]
    assert told == pytest.approx([sum(losses[:3]) / 3, sum(losses[4:]) / 4], rel=1e-6)
    finite = losses[:3] + losses[4:]
    assert result.metrics["train_loss"] == pytest.approx(sum(finite) / 7, rel=1e-6)


@pytest.mark.parametrize("history", [1000, 2])
@pytest.mark.parametrize("logging_steps", [1, 6, 8, 500])
def test_the_averages_are_over_the_losses_there_were(tmp_path, logging_steps, history):
    """However long the windows, and however short the history: those of the log, `train_loss`, and what train() returns."""
    trainer = make_trainer(tmp_path, Regression(), feature_rows(32, {13: math.nan}), logging_steps=logging_steps)
    nanproof.protect(trainer, policy=Policy(history=history))
    output = trainer.train()
    lines = [json.loads(line) for line in (tmp_path / "nanproof" / "steps.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 8 and not isinstance(losses[3], float)
    finite = [[loss for loss in losses[i : i + logging_steps] if isinstance(loss, float)] for i in range(0, 8, logging_steps)]
    windows = [sum(window) / len(window) if window else math.nan for window in finite]
    logged = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert logged == pytest.approx(windows[: 8 // logging_steps], nan_ok=True, rel=1e-5)
    everything = [loss for window in finite for loss in window]
    assert output.training_loss == output.metrics["train_loss"] == pytest.approx(sum(everything) / 7, rel=1e-5)


def test_the_schedule_waits_for_a_step_that_was_taken(tmp_path):
    """Learning rates as logged: the one of the refused step comes again."""
    trainer = make_trainer(tmp_path, llama(), token_rows(24, BAD))
    nanproof.protect(trainer)
    trainer.train()
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry]
    assert rates == pytest.approx([0.0, 0.002, 0.004, 0.006, 0.006, 0.008])


def test_nothing_stays_replaced(tmp_path):
    """After training the trainer, its arguments and its optimizer are as they were; training again works."""
    trainer = make_trainer(tmp_path, Regression(), feature_rows(16), save_total_limit=3)
    guard = nanproof.protect(trainer)
    before = set(vars(trainer)), set(vars(trainer.accelerator)), dict(vars(trainer.args))
    trainer.train()
    assert "training_step" not in vars(trainer) and "log" not in vars(trainer) and "evaluate" not in vars(trainer)
    assert set(vars(trainer.accelerator)) - before[1] <= {"step"}
    assert dict(vars(trainer.args)) == before[2]
    trainer.train()
    assert [record.step for record in guard.history] == [0, 1, 2, 3]
    with pytest.raises(UsageError, match="protected already"):
        nanproof.protect(trainer)


def test_nothing_stays_replaced_after_train_of_the_class(tmp_path):
    """`Trainer.train(trainer)` goes past the method that protect replaced; arguments, methods and the folder are free all the
    same."""
    trainer = make_trainer(tmp_path, Regression(), feature_rows(32, {13: math.nan}), save_total_limit=2)
    guard = nanproof.protect(trainer)
    Trainer.train(trainer)
    assert [incident.step for incident in guard.incidents] == [3]
    assert trainer.args.logging_nan_inf_filter is True and trainer.args.save_total_limit == 2
    assert not {"log", "training_step", "evaluate", "save_model"} & vars(trainer).keys()
    other = make_trainer(tmp_path, Regression(), feature_rows(32))
    nanproof.protect(other)
    other.train()


@pytest.mark.parametrize("before", [True, False])
def test_a_copy_of_a_protected_trainer_is_another_trainer(tmp_path, before):
    """Its train() trains the copy, under a guard of its own; it was the first trainer's."""
    trainer = make_trainer(tmp_path, Regression(), feature_rows(32, {13: math.nan}))
    guard = nanproof.protect(trainer)
    if not before:
        trainer.train()
    seen, kept = len(guard.incidents), weights(trainer.model)
    other = copy.deepcopy(trainer)
    assert other.nanproof is not guard
    other.train()
    assert same(weights(trainer.model), kept) and not same(weights(other.model), kept) and all_finite(other.model)
    assert len(guard.incidents) == seen and len(other.nanproof.incidents) == seen + 1


def test_an_error_in_the_forward_is_an_incident_and_still_raised(tmp_path):
    """An index beyond the vocabulary: the error goes on to the user, with a note, and the guard has it on record."""
    rows = token_rows(16)
    rows[9]["input_ids"] = torch.full((12,), 999)
    trainer = make_trainer(tmp_path, llama(), rows)
    guard = nanproof.protect(trainer)
    with pytest.raises(IndexError) as caught:
        trainer.train()
    [incident] = guard.incidents
    assert (incident.step, incident.kind) == (2, "exception")
    assert any("step 2" in note for note in getattr(caught.value, "__notes__", ["step 2"]))
    assert all_finite(trainer.model)


def test_a_run_of_bad_batches_ends(tmp_path):
    """Skipping is capped: with nothing to go back to, training halts with the diagnosis."""
    trainer = make_trainer(tmp_path, llama(), token_rows(64, range(8, 64)))
    nanproof.protect(trainer, policy=Policy(max_consecutive_skips=3))
    with pytest.raises(TrainingHalted, match=r"no good state to go back to.*snapshot_every.*no-supervised-targets"):
        trainer.train()
    assert all_finite(trainer.model)


def test_the_run_goes_back_to_a_good_state(tmp_path):
    """With copies to go back to, the cap sends weights, optimizer and schedule back; the trainer's loop goes on."""
    rows = feature_rows(80, dict.fromkeys(range(20, 32), math.nan))
    trainer = make_trainer(tmp_path, Regression(), rows)
    guard = nanproof.protect(trainer, policy=Policy(max_consecutive_skips=2, snapshot_every=2))
    trainer.train()
    assert "rewound" in [incident.action for incident in guard.incidents]
    assert trainer.state.global_step == 20 and all_finite(trainer.model)
    assert [record.step for record in guard.history][-1] == 19


def test_resuming_goes_on_as_if_nothing_had_happened(tmp_path):
    """Stopped and resumed from the Trainer's checkpoint, with a refused step before it: the same weights, bit for bit."""
    rows = token_rows(32, (4, 5, 6, 7))
    whole = make_trainer(tmp_path / "a", llama(), rows)
    nanproof.protect(whole)
    whole.train()

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = control.should_save = state.global_step == 4

    first = make_trainer(tmp_path / "b", llama(), rows, callbacks=[Stop()])
    guard = nanproof.protect(first)
    first.train()
    assert guard.next_step == 4 and guard.refused_so_far == 1
    second = make_trainer(tmp_path / "b", llama(seed=3), rows)
    guard = nanproof.protect(second)
    second.train(resume_from_checkpoint=True)
    assert [record.step for record in guard.history] == [4, 5, 6, 7]
    assert same(weights(second.model), weights(whole.model))


def test_rotation_keeps_the_newest_good_checkpoint(tmp_path):
    """`save_total_limit` deletes unproven checkpoints before the last one that proved good."""
    trainer = make_trainer(tmp_path, Regression(), feature_rows(120), save_strategy="steps", save_steps=3, save_total_limit=2)
    nanproof.protect(trainer)
    trainer.train()
    there = {path.name: json.loads((path / "nanproof.json").read_text())["state"] for path in tmp_path.glob("checkpoint-*")}
    assert there == {"checkpoint-3": "good", "checkpoint-21": "candidate", "checkpoint-30": "candidate"}
    assert trainer.args.save_total_limit == 2


def test_resuming_passes_over_broken_and_suspect_checkpoints(tmp_path, caplog):
    """`resume_from_checkpoint=True` takes the newest that is finite and that nothing speaks against."""
    from safetensors.torch import load_file, save_file

    trainer = make_trainer(tmp_path, Regression(), feature_rows(48), save_strategy="steps", save_steps=3)
    nanproof.protect(trainer)
    trainer.train()
    broken = tmp_path / "checkpoint-12" / "model.safetensors"
    tensors = load_file(broken)
    tensors["head.weight"][0, 3] = math.nan
    save_file(tensors, broken, metadata={"format": "pt"})
    mark = tmp_path / "checkpoint-9" / "nanproof.json"
    mark.write_text(json.dumps({"version": 1, "state": "suspect", "step": 9}))
    again = make_trainer(tmp_path, Regression(), feature_rows(48))
    guard = nanproof.protect(again)
    again.train(resume_from_checkpoint=True)
    assert guard.history[0].step == 6
    assert "checkpoint-12" in caplog.text and "head.weight" in caplog.text and "checkpoint-9" in caplog.text


def test_a_refused_step_taints_no_checkpoint(tmp_path):
    """A sample that overflows a BatchNorm's statistics: the buffers were put back, so what was saved before it stays good."""
    rows = feature_rows(160, {93: 1e30})
    trainer = make_trainer(tmp_path, Regression(), rows, save_strategy="steps", save_steps=10)
    guard = nanproof.protect(trainer)
    trainer.train()
    assert [i.step for i in guard.incidents] == [23] and all_finite(trainer.model)
    marks = {path.name: json.loads((path / "nanproof.json").read_text())["state"] for path in tmp_path.glob("checkpoint-*")}
    assert marks == {
        "checkpoint-10": "good",
        "checkpoint-20": "candidate",
        "checkpoint-30": "candidate",
        "checkpoint-40": "candidate",
    }


def test_counts_go_on_when_a_run_is_resumed(tmp_path):
    """`nanproof/skipped` in the log of a resumed run begins where the first one stopped."""
    rows = feature_rows(48, {5: math.nan})
    first = make_trainer(tmp_path, Regression(), rows, max_steps=6, save_strategy="steps", save_steps=6)
    nanproof.protect(first)
    first.train()
    second = make_trainer(tmp_path, Regression(), rows, max_steps=12)
    nanproof.protect(second)
    second.train(resume_from_checkpoint=True)
    assert [e["nanproof/skipped"] for e in second.state.log_history if "loss" in e] == [0] + [1] * 11


@pytest.mark.parametrize("how", ["nan", "suspect"])
def test_where_no_checkpoint_is_good_none_is_resumed_from(tmp_path, how):
    """They are passed over to the last one, which is said; it was resumed from all the same."""
    from safetensors.torch import load_file, save_file

    trainer = make_trainer(tmp_path, Regression(), feature_rows(32), save_strategy="steps", save_steps=4)
    nanproof.protect(trainer)
    trainer.train()
    for folder in tmp_path.glob("checkpoint-*"):
        if how == "nan":
            tensors = load_file(folder / "model.safetensors")
            tensors["head.bias"][0] = math.nan
            save_file(tensors, folder / "model.safetensors")
        else:
            (folder / "nanproof.json").write_text('{"version": 1, "state": "suspect", "step": 4}')
    again = make_trainer(tmp_path, Regression(), feature_rows(32), save_strategy="steps", save_steps=4, num_train_epochs=2)
    nanproof.protect(again)
    with pytest.raises(UsageError, match="none of the 2 checkpoints"):
        again.train(resume_from_checkpoint=True)


ENTRY = """
from integrations.tiny import llama, make_trainer, token_rows
def build():
    return {"trainer": make_trainer("elsewhere", llama(), token_rows(8), gradient_accumulation_steps=2)}
"""


def test_a_bundle_is_run_again_through_a_trainer(tmp_path, monkeypatch):
    """`nanproof replay` with a Trainer for an entry: the same loss, the same cause, `num_items_in_batch` and all."""
    from typer.testing import CliRunner

    from nanproof.cli import app

    trainer = make_trainer(tmp_path / "out", llama(), token_rows(48, range(24, 32)), gradient_accumulation_steps=2)
    guard = nanproof.protect(trainer)
    trainer.train()
    [incident] = guard.incidents
    (tmp_path / "entry_of_trainer.py").write_text(ENTRY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    done = CliRunner().invoke(app, ["replay", incident.bundle, "--entry", "entry_of_trainer:build", "--json"])
    assert done.exit_code == 1, done.output
    told = json.loads(done.stdout)
    assert told["diagnosis"]["cause"] == incident.diagnosis.cause == "no-supervised-targets"


def test_a_rewound_step_is_left_out_of_the_averages(tmp_path):
    """Going back takes the record away, but not the truth about the loss."""
    told = {}
    for name, policy in (("skip", Policy()), ("back", Policy(snapshot_every=2, max_consecutive_skips=0))):
        trainer = make_trainer(tmp_path / name, llama(dropout=0.0), token_rows(32, BAD), logging_steps=4, learning_rate=1e-6)
        nanproof.protect(trainer, policy=policy)
        told[name] = trainer.train().metrics["train_loss"], [e["loss"] for e in trainer.state.log_history if "loss" in e]
    assert told["back"][0] == pytest.approx(told["skip"][0], rel=1e-4)
    assert told["back"][1] == pytest.approx(told["skip"][1], rel=1e-4)


def test_seq2seq(tmp_path):
    """Seq2SeqTrainer with an encoder and a decoder."""
    from transformers import BartConfig, BartForConditionalGeneration, Seq2SeqTrainer, Seq2SeqTrainingArguments

    made = []
    for name, rows in (("a", token_rows(24, BAD)), ("b", without(token_rows(24), BAD))):
        torch.manual_seed(0)
        model = BartForConditionalGeneration(
            BartConfig(vocab_size=64, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
                       decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32,
                       pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2)
        )  # fmt: skip
        trainer = make_trainer(tmp_path / name, model, rows, cls=Seq2SeqTrainer, args=Seq2SeqTrainingArguments)
        guard = nanproof.protect(trainer)
        trainer.train()
        made.append((weights(model), guard))
    assert same(made[0][0], made[1][0])
    assert [i.step for i in made[0][1].incidents] == [3] and not made[1][1].incidents


def test_evaluating_in_between_is_not_training(tmp_path):
    """Evaluations see a settled model and leave no record."""
    trainer = make_trainer(tmp_path, llama(), token_rows(24, BAD), eval_strategy="steps", eval_steps=2, eval_rows=token_rows(8))
    guard = nanproof.protect(trainer)
    trainer.train()
    assert len(guard.history) == 6
    assert all(math.isfinite(entry["eval_loss"]) for entry in trainer.state.log_history if "eval_loss" in entry)


# -- callbacks -----------------------------------------------------------------------------------------------------------------


def test_the_monitors_look_before_clipping(tmp_path):
    """Norms as an independent look at the gradients has them, names of bad parameters, counts of NaN and Inf."""
    gradients, losses = GradientMonitorCallback(), LossCheckCallback()
    trainer = make_trainer(
        tmp_path, Regression(), feature_rows(16, {9: math.nan}), callbacks=[gradients, losses], max_grad_norm=1e-3
    )
    guard = nanproof.protect(trainer)
    oracle = []

    class Look(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **kwargs):
            oracle.append([float(p.grad.norm()) for p in trainer.model.parameters()])

    trainer.add_callback(Look())
    trainer.train()
    assert gradients.bad_steps == 1 and losses.nonfinite == [2]
    last = oracle[-1]
    assert gradients.last.mean == pytest.approx(sum(last) / len(last), rel=1e-5)
    assert (gradients.last.max, gradients.last.min) == (pytest.approx(max(last), rel=1e-5), pytest.approx(min(last), rel=1e-5))
    assert trainer.state.log_history[3]["nanproof/grad_norm_max"] == pytest.approx(max(last), rel=1e-5)
    assert guard.history[-1].clip > 1
    assert GradientMonitoringCallback is GradientMonitorCallback


def test_a_monitor_can_stop_the_run(tmp_path):
    """`halt_on_nan` ends training after the bad step; the bad values are in no weight."""
    monitor = GradientMonitorCallback(halt_on_nan=True)
    trainer = make_trainer(tmp_path, Regression(), feature_rows(32, {9: math.nan}), callbacks=[monitor])
    nanproof.protect(trainer)
    trainer.train()
    assert trainer.state.global_step == 3 and all_finite(trainer.model)
    assert monitor.last.nan == len(list(trainer.model.parameters())) == len(monitor.last.bad)


def test_an_empty_batch_is_seen_by_the_loss_check(tmp_path):
    """Loss and gradients of exactly 0: nothing is supervised, although nothing is NaN."""

    class Zero(Regression):
        def forward(self, x, labels):
            out = super().forward(x, labels)
            return {**out, "loss": out["loss"] * 0}

    check = LossCheckCallback()
    trainer = make_trainer(tmp_path, Zero(), feature_rows(8), callbacks=[check])
    nanproof.protect(trainer, policy=Policy(diagnose="never"))
    trainer.train()
    assert check.empty == [0, 1]


def test_the_activation_monitor_looks_every_so_often(tmp_path, caplog):
    """Largest outputs as a hook of our own sees them; NaN outputs are named; no hook stays."""
    monitor = ActivationMonitorCallback(check_every_n_steps=2)
    trainer = make_trainer(tmp_path, Regression(), feature_rows(16, {9: math.nan}), callbacks=[monitor])
    nanproof.protect(trainer)
    trainer.train()
    assert "body.0" in caplog.text and math.isnan(monitor.last["body.0"])
    assert not any(module._forward_hooks for module in trainer.model.modules())


# -- around it -----------------------------------------------------------------------------------------------------------------


def test_what_is_no_trainer_is_refused():
    """The error says what can be protected, and what to use instead."""
    with pytest.raises(UsageError, match=r"protect\(Linear\).*nanproof.Guard"):
        nanproof.protect(torch.nn.Linear(1, 1))


def test_a_policy_of_another_kind_is_refused(tmp_path):
    """Said at once, by name."""
    with pytest.raises(UsageError, match=r"a nanproof\.Policy is needed, not str"):
        nanproof.protect(make_trainer(tmp_path, Regression(), feature_rows(8)), policy="skip")


def test_another_version_is_warned_of_once(monkeypatch, caplog):
    """Outside of the tested range: one line, and an honest try."""
    monkeypatch.setattr(versions, "version", lambda package: "7.1.0.dev0")
    monkeypatch.setattr(versions, "_said", set())
    versions.check_version("transformers")
    versions.check_version("transformers")
    assert caplog.text.count("transformers 7.1.0.dev0 is outside") == 1


def test_the_installed_versions_are_in_the_tested_range(caplog):
    """The ranges hold what these tests run with."""
    for package in versions.TESTED:
        versions.check_version(package)
    assert "outside" not in caplog.text


RANKS = """
import os, sys, math, torch
from integrations.tiny import Regression, feature_rows, make_trainer
import nanproof
rank = int(os.environ["RANK"])
def run(bad, name, protect=True):
    trainer = make_trainer(sys.argv[1] + "/" + name, Regression(), feature_rows(48, bad), ddp_backend="gloo", max_grad_norm=1.0)
    guard = nanproof.protect(trainer) if protect else None
    trainer.train()
    flat = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    both = [torch.empty_like(flat) for _ in range(2)]
    torch.distributed.all_gather(both, flat)
    assert torch.equal(both[0], both[1]) or not protect, "ranks disagree"
    return flat, guard, trainer
flat, guard, trainer = run({21: math.nan}, "a")     # batch 5 of 4 rows: rank 1 of step 2
assert torch.isfinite(flat).all()
found = [(i.step, i.rank, i.diagnosis.cause, i.diagnosis.samples) for i in guard.incidents]
assert found == [(2, 1, "one-rank-nonfinite", (1,))], found
told = [e for e in trainer.state.log_history if "loss" in e]
if rank == 0:
    assert told[-1]["nanproof/skipped"] == 1 and all(math.isfinite(e["loss"]) for e in told if e["step"] != 3), told
flat, _, _ = run({21: math.nan}, "b", protect=False)
assert not torch.isfinite(flat).all()
torch.distributed.barrier()
print("rank", rank, "done", flush=True)
os._exit(0)
"""


def test_two_ranks_refuse_alike(tmp_path):
    """A bad row on one of two ranks, started as torchrun does: both refuse, both end with the same weights, the rank is named."""
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    for done in forked.two_ranks_of(script, tmp_path):
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
        assert done.stdout.count("done") == 1
