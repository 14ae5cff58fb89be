"""Callbacks: what is called, when and in which order, and what a callback may do to a run that is protected."""

from __future__ import annotations

import math

import pytest
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState
from transformers.trainer_callback import ExportableState

from integrations.huggingface.trainer.parts import (
    BATCH,
    EPOCHS,
    POINTS,
    STEPS,
    Near,
    assert_same_weights,
    line_trainer,
    trained_plain,
    weights,
)
from integrations.huggingface.trainer.protection import UNPROTECTED

EVENTS = (
    "init_end train_begin train_end epoch_begin epoch_end step_begin pre_optimizer_step optimizer_step substep_end step_end "
    "evaluate predict save log prediction_step"
).split()


class Recorder(TrainerCallback):
    """Notes every event by its name."""

    def __init__(self):
        self.events = []


for _event in EVENTS:

    def _note(self, args, state, control, _event=_event, **kwargs):
        self.events.append(_event)

    setattr(Recorder, f"on_{_event}", _note)


def expected_events(*, log=500, save=500, evaluate=None, each_epoch=False, accumulate=1):
    """The order written down by hand, from the description of the training loop."""
    batches = POINTS // BATCH
    evaluation = ["prediction_step"] * batches + ["log", "evaluate"]
    events, step = ["init_end", "train_begin"], 0
    for _ in range(EPOCHS):
        events.append("epoch_begin")
        for _ in range(batches // accumulate):
            step += 1
            events += ["step_begin", *["substep_end"] * (accumulate - 1)]
            events += ["pre_optimizer_step", "optimizer_step", "step_end"]
            last = step == STEPS // accumulate
            events += ["log"] * (step % log == 0)
            if evaluate and (step % evaluate == 0 or last):
                events += evaluation
            events += ["save"] * (step % save == 0 or last)
        events.append("epoch_end")
        events += evaluation * each_epoch
    return [*events, "log", "train_end"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {}),
        ({"logging_steps": 5}, {"log": 5}),
        ({"save_steps": 5}, {"save": 5}),
        ({"eval_steps": 5, "eval_strategy": "steps"}, {"evaluate": 5}),
        ({"eval_strategy": "epoch"}, {"each_epoch": True}),
        (
            {"logging_steps": 3, "save_steps": 10, "eval_steps": 5, "eval_strategy": "steps"},
            {"log": 3, "save": 10, "evaluate": 5},
        ),
        ({"gradient_accumulation_steps": 4}, {"accumulate": 4}),
    ],
)
def test_events_come_in_the_documented_order(tmp_path, options, expected):
    """After `test_event_flow`: a callback of nanproof's own may not show, and a step that is run again neither."""
    recorder = Recorder()
    line_trainer(tmp_path, extras={"callbacks": [recorder]}, **options).train()
    assert recorder.events == expected_events(**expected)


def test_the_gradients_are_there_before_the_step_and_the_weights_move_in_it(tmp_path):
    """After the promise of `on_pre_optimizer_step` and `on_optimizer_step`, with a deliberate change.

    The Trainer promises clipped gradients in the first. Protected, clipping is part of the guarded step, so that blame is laid
    before it: the callback sees the gradients as backward left them, and the weights end where they end unprotected.
    """
    seen = []

    class Watcher(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
            seen.append(("before", model.b.item(), model.b.grad.item(), model.a.grad.item()))

        def on_optimizer_step(self, args, state, control, model=None, **kwargs):
            seen.append(("after", model.b.item(), model.b.grad.item(), model.a.grad.item()))

    def build():
        return line_trainer(tmp_path, learning_rate=0.1, max_steps=4, logging_steps=1, extras={"callbacks": [Watcher()]})

    trainer = build()
    trainer.train()
    assert [event[0] for event in seen] == ["before", "after"] * 4
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    for before, after, norm in zip(seen[::2], seen[1::2], norms, strict=True):
        assert after[1] != before[1]
        clipped = min(norm, 1.0) if UNPROTECTED else norm
        assert math.hypot(*before[2:]) == pytest.approx(clipped, rel=1e-5)
    assert_same_weights(trainer, trained_plain(build))


def test_a_callback_stops_the_training(tmp_path):
    """After `test_callback_can_stop_training`."""

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = True

    trainer = line_trainer(tmp_path, max_steps=10, save_strategy="no", extras={"callbacks": [Stop()]})
    trainer.train()
    assert trainer.state.global_step == 1


def test_a_callback_may_ask_for_logs_evaluations_and_checkpoints(tmp_path):
    """After `test_callback_receives_control_flags`: what `on_step_end` asks for is done at that step."""

    class Ask(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                control.should_log = control.should_evaluate = control.should_save = True

    trainer = line_trainer(tmp_path, max_steps=5, save_strategy="no", extras={"callbacks": [Ask()]})
    trainer.train()
    assert [entry["step"] for entry in trainer.state.log_history if "loss" in entry or "eval_loss" in entry] == [3, 3]
    assert (tmp_path / "checkpoint-3" / "model.safetensors").is_file()


def test_a_callback_that_changes_the_weights_is_heeded(tmp_path):
    """A user's own moving average or clamp in `on_optimizer_step`: the next step starts from what it wrote."""

    class Clamp(TrainerCallback):
        def on_optimizer_step(self, args, state, control, model=None, **kwargs):
            model.b.data.clamp_(max=0.25)

    def build():
        return line_trainer(tmp_path, learning_rate=0.1, extras={"callbacks": [Clamp()]})

    trainer = build()
    trainer.train()
    assert trainer.model.b.item() == 0.25
    assert weights(trainer) == weights(trained_plain(build))


def test_one_save_an_epoch(tmp_path):
    """After `test_no_duplicate_save_on_epoch_strategy`: the last step of the training is also the end of an epoch."""
    recorder = Recorder()
    line_trainer(tmp_path, max_steps=2, save_strategy="epoch", extras={"callbacks": [recorder]}).train()
    assert recorder.events.count("save") == 1


@pytest.mark.parametrize("patience", [1, 3])
def test_early_stopping(tmp_path, patience):
    """After `test_early_stopping_callback`: after so many evaluations without progress the run ends, with its best weights."""
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True, "num_train_epochs": 20}
    more = {"metric_for_best_model": "accuracy", "learning_rate": 0.001, "greater_is_better": True}
    extras = {"callbacks": [EarlyStoppingCallback(patience, 0.0001)], "compute_metrics": Near()}
    trainer = line_trainer(tmp_path, extras=extras, **options, **more)
    result = trainer.train()
    assert result.global_step == (patience + 1) * POINTS // BATCH


def test_early_stopping_needs_something_to_measure(tmp_path):
    """After `test_early_stopping_callback`, the failing half: it is the Trainer's own message that comes."""
    trainer = line_trainer(tmp_path, num_train_epochs=1, extras={"callbacks": [EarlyStoppingCallback(1)]})
    with pytest.raises(AssertionError, match="EarlyStoppingCallback requires"):
        trainer.train()


RESUMABLE = {
    "load_best_model_at_end": True,
    "save_strategy": "steps",
    "eval_strategy": "steps",
    "save_steps": 2,
    "eval_steps": 2,
    "max_steps": 2,
}


def resumed(tmp_path, callbacks):
    options = {**RESUMABLE, "restore_callback_states_from_checkpoint": True}
    trainer = line_trainer(tmp_path, extras={"callbacks": callbacks}, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    return trainer.callback_handler.callbacks


def test_the_state_of_early_stopping_is_in_the_checkpoint(tmp_path):
    """After `test_early_stopping_state_persists` and `test_mixed_stateful_and_regular_callbacks`."""
    given = [Recorder(), EarlyStoppingCallback(early_stopping_patience=5, early_stopping_threshold=0.2)]
    line_trainer(tmp_path, extras={"callbacks": given}, **RESUMABLE).train()
    callbacks = resumed(tmp_path, [EarlyStoppingCallback(), Recorder()])
    (found,) = (callback for callback in callbacks if isinstance(callback, EarlyStoppingCallback))
    assert (found.early_stopping_patience, found.early_stopping_threshold) == (5, 0.2)


class Named(TrainerCallback, ExportableState):
    """A callback whose name is part of the checkpoint."""

    def __init__(self, name="nobody"):
        self.name = name

    def state(self):
        return {"args": {"name": self.name}, "attributes": {}}


def test_two_callbacks_of_one_class_each_get_their_state_back(tmp_path):
    """After `test_multiple_instances_of_same_stateful_callback`."""
    line_trainer(tmp_path, extras={"callbacks": [Named("first"), Named("second")]}, **RESUMABLE).train()
    callbacks = resumed(tmp_path, [Named(), Named()])
    assert [callback.name for callback in callbacks if isinstance(callback, Named)] == ["first", "second"]


def test_the_state_of_the_control_is_in_the_checkpoint(tmp_path):
    """After `test_trainer_control_state_persists`: a run that ended says so when it is loaded."""
    line_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    trainer = line_trainer(tmp_path, max_steps=2, restore_callback_states_from_checkpoint=True)
    trainer.state = TrainerState.load_from_json(str(tmp_path / "checkpoint-2" / "trainer_state.json"))
    trainer._load_callback_state()
    assert trainer.control.should_training_stop


def test_the_logs_of_a_protected_run_are_the_logs_of_a_plain_one(tmp_path):
    """Every entry of the history: same keys, same steps, same numbers but for the times. Nanproof's own two come on top."""

    def build():
        return line_trainer(tmp_path, learning_rate=0.1, logging_steps=3, eval_strategy="epoch")

    def history(trainer):
        timed = ("runtime", "per_second")
        entries = trainer.state.log_history
        return [{k: v for k, v in e.items() if not k.endswith(timed) and not k.startswith("nanproof/")} for e in entries]

    trainer = build()
    trainer.train()
    assert history(trainer) == history(trained_plain(build))
    if not UNPROTECTED:
        own = [{k: v for k, v in e.items() if k.startswith("nanproof/")} for e in trainer.state.log_history if "loss" in e]
        assert own == [{"nanproof/skipped": 0, "nanproof/incidents": 0}] * (STEPS // 3)
