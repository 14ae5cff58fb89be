"""Evaluation and prediction, before, between and after the steps of a protected training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback

from integrations.huggingface.trainer.parts import (
    DictLine,
    Line,
    Near,
    Points,
    Ragged,
    Stream,
    arguments,
    assert_same_weights,
    line_trainer,
    trained_plain,
)


class NearByBatch:
    """The same metric as `Near`, gathered batch by batch."""

    def __init__(self):
        self.hits = []

    def __call__(self, prediction, compute_result):
        predictions, labels = (part[0] if isinstance(part, tuple) else part for part in prediction)
        self.hits += (torch.abs(predictions - labels) <= 0.25).float().tolist()
        if not compute_result:
            return None
        result, self.hits = {"accuracy": float(np.mean(self.hits))}, []
        return result


def by_hand(points, shift=0.0, a=1.5, b=2.5):
    y = a * points.x + b
    return float(((y - points.ys[0]) ** 2).mean()), Near()((y + shift, points.ys[0]))["accuracy"]


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize(("count", "shift"), [(64, 0.0), (66, 0.0), (64, 1.0)])
def test_evaluation(tmp_path, batched, count, shift):
    """After `test_evaluate` and `test_evaluate_with_batch_eval_metrics`: an odd batch, changed logits."""
    extras = {"compute_metrics": NearByBatch() if batched else Near()}
    if shift:
        extras["preprocess_logits_for_metrics"] = lambda logits, labels: logits + shift
    trainer = line_trainer(tmp_path, a=1.5, b=2.5, eval_points=count, batch_eval_metrics=batched, extras=extras)
    result = trainer.evaluate()
    loss, accuracy = by_hand(trainer.eval_dataset, shift)
    assert result["eval_loss"] == pytest.approx(loss, abs=1e-5)
    assert result["eval_accuracy"] == pytest.approx(accuracy)


@pytest.mark.parametrize(("twice", "targets", "count"), [(False, 1, 64), (False, 1, 66), (True, 1, 64), (True, 2, 64)])
def test_prediction(tmp_path, twice, targets, count):
    """After `test_predict`: one output or two, one label or two."""
    trainer = line_trainer(tmp_path, a=1.5, b=2.5, twice=twice, targets=targets, eval_points=count)
    result = trainer.predict(trainer.eval_dataset)
    outputs = result.predictions if twice else (result.predictions,)
    assert len(outputs) == 1 + twice
    for output in outputs:
        np.testing.assert_allclose(output, 1.5 * trainer.eval_dataset.x + 2.5, rtol=1e-5, atol=1e-6)
    labels = result.label_ids if targets == 2 else (result.label_ids,)
    assert all(np.array_equal(one, other) for one, other in zip(labels, trainer.eval_dataset.ys, strict=True))


def test_evaluations_between_steps_do_not_touch_the_training(tmp_path):
    """After the evaluations of `test_event_flow`: a run that is evaluated at every step trains as one that never is."""
    options = {"learning_rate": 0.1, "eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    trainer = line_trainer(tmp_path, max_steps=12, extras={"compute_metrics": Near()}, **options)
    trainer.train()
    assert sum("eval_loss" in entry for entry in trainer.state.log_history) == 13
    assert_same_weights(trainer, trained_plain(lambda: line_trainer(tmp_path, max_steps=12, learning_rate=0.1)))


def test_evaluation_between_the_micro_batches_of_a_step(tmp_path):
    """A callback that evaluates in `on_substep_end`: forward passes in the middle of a step are none of the step's."""

    class Between(TrainerCallback):
        trainer = None

        def on_substep_end(self, args, state, control, **kwargs):
            self.trainer.evaluate()

    def build(between):
        callbacks = [between] if between else []
        trainer = line_trainer(
            tmp_path, learning_rate=0.1, gradient_accumulation_steps=2, max_steps=4, extras={"callbacks": callbacks}
        )
        if between:
            between.trainer = trainer
        return trainer

    trainer = build(Between())
    trainer.train()
    assert_same_weights(trainer, trained_plain(lambda: build(None)))


def test_evaluation_before_and_after_training(tmp_path):
    """After `test_trainer_works_with_dict` and `test_eval_use_gather_object`: the second is better than the first."""
    points = Points()
    options = {"learning_rate": 0.1, "eval_use_gather_object": True}
    trainer = Trainer(DictLine(), arguments(tmp_path, **options), train_dataset=points, eval_dataset=points)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    after = trainer.evaluate()["eval_loss"]
    loss, _ = by_hand(points, a=trainer.model.a.item(), b=trainer.model.b.item())
    assert after < before and after == pytest.approx(loss, rel=1e-4)


def test_several_evaluation_sets_have_names(tmp_path):
    """After the dict of evaluation sets in the Trainer: each is evaluated, under its own name."""
    sets = {"near": Points(32), "far": Points(16, seed=7)}
    options = {"eval_strategy": "epoch", "num_train_epochs": 1}
    trainer = Trainer(Line(), arguments(tmp_path, **options), train_dataset=Points(), eval_dataset=sets)
    trainer.train()
    names = {key for entry in trainer.state.log_history for key in entry if key.endswith("_loss")}
    assert {"eval_near_loss", "eval_far_loss"} <= names


def test_lengths_that_change_from_batch_to_batch(tmp_path):
    """After `test_dynamic_shapes`: in training, evaluation and prediction."""
    data = Ragged()

    def build():
        options = {"learning_rate": 0.1, "train_sampling_strategy": "sequential"}
        return Trainer(Line(), arguments(tmp_path, **options), train_dataset=data, eval_dataset=data)

    trainer = build()
    trainer.train()
    assert_same_weights(trainer, trained_plain(build))
    trainer.evaluate()
    a, b = trainer.model.a.item(), trainer.model.b.item()
    for x, y in zip(data.xs, trainer.predict(data).predictions, strict=True):
        np.testing.assert_allclose(y[: len(x)], a * x + b, rtol=1e-4, atol=1e-5)
        assert np.all(y[len(x) :] == -100)


def test_evaluation_and_prediction_of_a_stream(tmp_path):
    """After `test_evaluation_iterable_dataset` and `test_predict_iterable_dataset`."""
    points = Points()
    trainer = Trainer(Line(1.5, 2.5), arguments(tmp_path), eval_dataset=Stream(), compute_metrics=Near())
    result = trainer.evaluate()
    loss, accuracy = by_hand(points)
    assert result["eval_loss"] == pytest.approx(loss, abs=1e-5) and result["eval_accuracy"] == pytest.approx(accuracy)
    np.testing.assert_allclose(trainer.predict(Stream()).predictions, 1.5 * points.x + 2.5, rtol=1e-5, atol=1e-6)
