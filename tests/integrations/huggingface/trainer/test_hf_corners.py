"""Corners of the training loop: saves in the middle of a step, epochs cut short, exceptions, losses that eat their inputs."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration, Trainer, TrainerCallback
from transformers.trainer_jit_checkpoint import JITCheckpointCallback

import nanproof
from integrations.huggingface.trainer.parts import (
    BATCH,
    POINTS,
    STEPS,
    Line,
    Points,
    Tokens,
    arguments,
    assert_same_weights,
    line_trainer,
    tiny_llama,
    trained,
    trained_plain,
    weights,
)
from integrations.huggingface.trainer.protection import UNPROTECTED, plain


class AskForACheckpoint(TrainerCallback):
    """What the signal handler does a moment after a SIGTERM."""

    def __init__(self, event, step):
        self.step, self.manager = step, None
        setattr(self, f"on_{event}", self.ask)

    def ask(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.manager.is_checkpoint_requested = True


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("event", "at"), [("pre_optimizer_step", 3), ("step_begin", 3), ("step_end", 4)])
def test_a_checkpoint_at_the_last_moment(tmp_path, monkeypatch, event, at, accumulate):
    """After the `JITCheckpointTest`s: saved before the optimizer's step or after it, the run goes on from there to its end."""
    monkeypatch.setattr("signal.signal", lambda *args: None)
    options = {"learning_rate": 0.1, "gradient_accumulation_steps": accumulate, "save_strategy": "no"}

    def interrupted():
        asks = AskForACheckpoint(event, at)
        trainer = line_trainer(tmp_path, enable_jit_checkpoint=True, extras={"callbacks": [asks]}, **options)
        # the one that asks has to come before the one that saves
        trainer.callback_handler.callbacks.sort(key=lambda callback: isinstance(callback, JITCheckpointCallback))
        (saves,) = (callback for callback in trainer.callback_handler.callbacks if isinstance(callback, JITCheckpointCallback))
        asks.manager = saves.jit_manager
        return trainer

    first = trained(interrupted)
    assert first.state.global_step in (at, at + 1)
    again = line_trainer(tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{at}"))
    assert_same_weights(again, trained_plain(lambda: line_trainer(tmp_path, **options)))


@pytest.mark.parametrize("event", ["substep_end", "step_end"])
def test_an_epoch_is_cut_short(tmp_path, event):
    """After the `should_epoch_stop` of the control: what was accumulated by then goes into the next epoch's first step."""

    class Cut(TrainerCallback):
        def cut(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step % 3 == 2

    setattr(Cut, f"on_{event}", Cut.cut)

    def build():
        options = {"learning_rate": 0.1, "gradient_accumulation_steps": 2, "max_steps": 9, "per_device_train_batch_size": 4}
        return line_trainer(tmp_path, extras={"callbacks": [Cut()]}, **options)

    trainer, expected = trained(build), trained_plain(build)
    assert trainer.state.global_step == expected.state.global_step
    assert_same_weights(trainer, expected)


def test_training_ends_within_a_step(tmp_path):
    """A callback stops between two micro-batches: the gradients so far are of no step, and the weights stay."""

    class Stop(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    def build():
        return line_trainer(tmp_path, learning_rate=0.1, gradient_accumulation_steps=2, extras={"callbacks": [Stop()]})

    trainer = trained(build)
    assert trainer.state.global_step == 2
    assert_same_weights(trainer, trained_plain(build))


@pytest.mark.incidents
@pytest.mark.skipif(UNPROTECTED, reason="nobody is protected in this run")
@pytest.mark.parametrize("lag", [0, 2])
def test_the_last_verdicts_come_in_though_training_ends_within_a_step(tmp_path, lag):
    """A bad step just before a stop between two micro-batches is reported, also where verdicts are late."""

    class Stop(TrainerCallback):
        def on_substep_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 2

    data = Points()
    data.ys[0][20] = math.nan
    options = {"learning_rate": 0.1, "gradient_accumulation_steps": 2, "train_sampling_strategy": "sequential"}
    args = arguments(tmp_path, optim="adamw_torch_fused", **options)
    trainer = Trainer(Line(), args, train_dataset=data, callbacks=[Stop()])
    guard = nanproof.protect(trainer, policy=nanproof.Policy(lag=lag))
    trainer.train()
    assert [record.action for record in guard.history] == ["clipped", "skipped"]
    assert [incident.step for incident in guard.incidents] == [1]


def test_after_an_exception_the_trainer_can_train_again(tmp_path):
    """A callback raises: its exception comes through, nothing stays replaced, and the next `train()` is like any other."""

    class Once(TrainerCallback):
        raised = False

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3 and not self.raised:
                self.raised = True
                raise KeyError("of the user's own")

    def build():
        return line_trainer(tmp_path, learning_rate=0.1, extras={"callbacks": [Once()]})

    def raises(trainer):
        with pytest.raises(KeyError, match="of the user's own"):
            trainer.train()
        schedule = type(trainer.lr_scheduler).__name__
        trainer.train()
        assert type(trainer.lr_scheduler).__name__ == schedule == "LambdaLR"
        assert trainer.args.to_dict() == arguments(tmp_path, learning_rate=0.1).to_dict()
        return trainer

    with plain():
        expected = raises(build())
    assert_same_weights(raises(build()), expected)


def test_the_arguments_in_a_checkpoint_are_the_users(tmp_path):
    """After `test_training_arguments_are_left_untouched`, for those who read `training_args.bin` later, and for reports."""
    seen = {}

    class Report(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            seen.update(args.to_dict())

    options = {"save_steps": 5, "save_total_limit": 2, "logging_nan_inf_filter": True}
    trained(lambda: line_trainer(tmp_path, extras={"callbacks": [Report()]}, **options))
    expected = arguments(tmp_path, **options).to_dict()
    assert torch.load(tmp_path / f"checkpoint-{STEPS}" / "training_args.bin", weights_only=False).to_dict() == expected
    assert seen == expected


class Absolute(Trainer):
    """Takes the labels out of what it was given."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        y = model(**inputs)[0]
        loss = (y - labels).abs().mean()
        return (loss, {"loss": loss, "y": y}) if return_outputs else loss


@pytest.mark.incidents
@pytest.mark.skipif(UNPROTECTED, reason="nobody is protected in this run")
def test_a_loss_that_takes_the_labels_away_can_be_run_again(tmp_path, guards):
    """A refused step of such a trainer is diagnosed: each time it is run again it finds its labels."""
    data = Points()
    data.ys[0][20] = math.nan
    options = {"train_sampling_strategy": "sequential", "num_train_epochs": 1, "learning_rate": 0.1}
    trainer = Absolute(Line(), arguments(tmp_path, **options), train_dataset=data)
    trainer.train()
    (incident,) = guards[0].guard.incidents
    assert incident.step == 2 and incident.diagnosis is not None and incident.diagnosis.where == "batch['labels']"
    assert all(torch.isfinite(p).all() for p in weights(trainer).values())


@pytest.mark.incidents
@pytest.mark.skipif(UNPROTECTED, reason="nobody is protected in this run")
@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("event", ["substep_end", "pre_optimizer_step"])
def test_an_evaluation_within_a_step_spares_its_gradients(tmp_path, event, lag):
    """A verdict on an earlier step comes while a step is under way: what that step has gathered so far is not touched."""

    class Between(TrainerCallback):
        trainer = None

        def evaluate(self, args, state, control, **kwargs):
            self.trainer.evaluate()
            self.trainer.save_model(str(tmp_path / "between"))

    setattr(Between, f"on_{event}", Between.evaluate)
    data = Points()
    data.ys[0][20] = math.nan

    def run(*callbacks):
        options = {"train_sampling_strategy": "sequential", "learning_rate": 0.1, "gradient_accumulation_steps": 2}
        args = arguments(tmp_path, num_train_epochs=2, optim="adamw_torch_fused", **options)
        trainer = Trainer(Line(), args, train_dataset=data, eval_dataset=Points(8), callbacks=list(callbacks))
        for callback in callbacks:
            callback.trainer = trainer
        guard = nanproof.protect(trainer, policy=nanproof.Policy(lag=lag))
        with plain():
            trainer.train()
        assert [record.step for record in guard.history if record.action == "skipped"] == [1, 5]
        return trainer

    assert_same_weights(run(Between()), run())


@pytest.mark.incidents
@pytest.mark.parametrize("bad", [False, True])
def test_what_is_counted_is_counted_once(tmp_path, bad):
    """After `test_flos_extraction` and the token counts: a step that was refused and run again counts as one."""

    class Breaks(TrainerCallback):
        """Once, right before a step, a gradient is no number."""

        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            if bad and state.global_step == 1:
                next(model.parameters()).grad[0, 0] = math.nan

    options = {"include_num_input_tokens_seen": "all", "max_steps": 3, "per_device_train_batch_size": 4}
    trainer = Trainer(tiny_llama(), arguments(tmp_path, **options), train_dataset=Tokens(), callbacks=[Breaks()])
    cost = trainer.floating_point_ops(next(iter(trainer.get_train_dataloader())))
    trainer.train()
    assert trainer.state.num_input_tokens_seen == 3 * 4 * 16
    assert trainer.state.total_flos == pytest.approx(3 * cost)


def test_a_sequence_to_sequence_trainer(tmp_path):
    """After the tests of `Seq2SeqTrainer`: trains the same, and generates in the evaluations in between."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(2, 40, (16, 6), generator=draw)
    data = [{"input_ids": row, "labels": row.flip(0)} for row in rows]

    def build():
        torch.manual_seed(0)
        shape = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2}
        model = T5ForConditionalGeneration(T5Config(vocab_size=40, decoder_start_token_id=0, **shape))
        quiet = {"report_to": "none", "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False}
        options = {"predict_with_generate": True, "generation_max_length": 7, "eval_strategy": "steps", "eval_steps": 2}
        args = Seq2SeqTrainingArguments(str(tmp_path), max_steps=4, learning_rate=1e-2, save_strategy="no", **options, **quiet)
        return Seq2SeqTrainer(model, args, train_dataset=data, eval_dataset=data, compute_metrics=lambda p: {"rows": len(p[0])})

    trainer = trained(build)
    assert [entry["eval_rows"] for entry in trainer.state.log_history if "eval_rows" in entry] == [16, 16]
    assert_same_weights(trainer, trained_plain(build))


def test_half_precision_weights_train_the_same(tmp_path):
    """bf16 weights, not autocast: the guard looks at them after each step, and that changes nothing."""

    def build():
        torch.manual_seed(0)
        model = tiny_llama().to(torch.bfloat16)
        return Trainer(model, arguments(tmp_path, max_steps=6, learning_rate=1e-2), train_dataset=Tokens())

    assert_same_weights(trained(build), trained_plain(build), rtol=0.016, atol=1e-3)


def test_an_epoch_shorter_than_a_step(tmp_path):
    """After the epochs with fewer batches than `gradient_accumulation_steps`: each is one step."""

    def build():
        return line_trainer(tmp_path, points=2 * BATCH, learning_rate=0.1, gradient_accumulation_steps=POINTS)

    trainer = trained(build)
    assert trainer.state.global_step == 3
    assert_same_weights(trainer, trained_plain(build))


class Annealed(Trainer):
    """Its loss goes by the step, as a curriculum or an annealed penalty does; one step is bad."""

    bad = False

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss = super().compute_loss(model, inputs, **kwargs) * (1 + self.state.global_step) / STEPS
        return loss * math.nan if self.bad and self.state.global_step == 3 else loss


@pytest.mark.incidents
def test_a_step_is_run_again_as_of_its_own_time(tmp_path):
    """A loss that depends on the count of steps is the same when a step behind a bad one is taken later."""
    runs = []
    for late in (0, 2):
        trainer = line_trainer(tmp_path / str(late), trainer=Annealed, learning_rate=0.1, logging_steps=100, max_grad_norm=0.0)
        trainer.bad = True
        guard = nanproof.protect(trainer, policy=nanproof.Policy(lag=late))
        trainer.train()
        assert guard.incidents[0].step == 3
        runs.append(trainer)
    assert_same_weights(*runs, rtol=0, atol=0)


class SometimesByHand(Trainer):
    """Some of its steps call `loss.backward()` itself: those cannot be run again."""

    by_hand: tuple[int, ...] = ()

    def training_step(self, model, inputs, num_items_in_batch=None):
        if self.state.global_step not in self.by_hand:
            return super().training_step(model, inputs, num_items_in_batch)
        loss = model(**self._prepare_inputs(inputs))[0]
        loss.backward()
        return loss.detach()


@pytest.mark.incidents
@pytest.mark.parametrize("by_hand", [(4,), (5,), (4, 5)])
def test_the_schedule_counts_what_was_taken_where_some_steps_cannot_be_run_again(tmp_path, by_hand):
    """A step behind a bad one that cannot be run again neither ends the run nor costs the schedule a step."""
    trainer = line_trainer(tmp_path, trainer=SometimesByHand, learning_rate=0.1, logging_steps=100)
    trainer.by_hand = by_hand
    bad, original = iter([False] * 3 + [True]), trainer.compute_loss
    trainer.compute_loss = lambda *args, **kwargs: original(*args, **kwargs) * (float("nan") if next(bad, False) else 1)
    guard = nanproof.protect(trainer, policy=nanproof.Policy(lag=2))
    trainer.train()
    assert [incident.step for incident in guard.incidents] == [3]
    assert sorted(record.step for record in guard.history) == list(range(STEPS))
    assert trainer.lr_scheduler.last_epoch == STEPS - 1


class WritesIntoItsBatch(Annealed):
    """Every look at the batch halves it."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        inputs["x"].mul_(0.5)
        return super().compute_loss(model, inputs, *args, **kwargs)


class ScalesGradients(TrainerCallback):
    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        for p in model.parameters():
            p.grad.mul_(0.1)


@pytest.mark.incidents
@pytest.mark.parametrize(("kind", "callbacks"), [(WritesIntoItsBatch, []), (Annealed, [ScalesGradients])])
def test_what_cannot_be_done_twice_is_not(tmp_path, kind, callbacks):
    """A batch that the loss writes into and gradients that a callback changes: late verdicts train the weights that immediate
    ones do. (Steps behind a bad one were run again with a batch halved twice, and without the callback.)"""
    runs = []
    for late in (0, 2):
        extras = {"callbacks": [callback() for callback in callbacks]}
        options = {"learning_rate": 0.01, "logging_steps": 100, "optim": "sgd", "lr_scheduler_type": "constant"}
        trainer = line_trainer(tmp_path / str(late), trainer=kind, extras=extras, **options)
        trainer.bad = True
        guard = nanproof.protect(trainer, policy=nanproof.Policy(lag=late))
        trainer.train()
        assert guard.incidents[0].step == 3
        runs.append(trainer)
    assert_same_weights(*runs, rtol=0, atol=0)
    assert trainer.lr_scheduler.last_epoch == STEPS - 1
