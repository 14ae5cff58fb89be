"""Optimizers and schedules: each trains to the same weights under protection, and its learning rates come out the same."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import Trainer, get_polynomial_decay_schedule_with_warmup
from transformers.optimization import Adafactor, AdafactorSchedule, GreedyLR

from integrations.huggingface.trainer.parts import (
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

BY_NAME = ("adamw_torch", "adamw_torch_fused", "adafactor", "sgd", "adagrad", "rmsprop")


@pytest.mark.parametrize("name", BY_NAME)
def test_every_optimizer_of_torch_trains_the_same(tmp_path, name):
    """After `test_bnb_optim` and its like, with the optimizers that come with torch and transformers: on a language model.

    A Llama, not the original's GPT-2: there the gradient of the keys' bias is 0 but for rounding, which these optimizers
    blow up to the size of a step, so that two runs that differ in one last bit end with other biases.
    """

    def build():
        torch.manual_seed(0)
        options = {"optim": name, "learning_rate": 1e-3, "logging_steps": 5, "logging_nan_inf_filter": False, "max_steps": 10}
        return Trainer(tiny_llama(), arguments(tmp_path, **options), train_dataset=Tokens())

    before, trainer, expected = weights(build()), trained(build), trained_plain(build)
    assert any(not torch.equal(before[key], p) for key, p in weights(trainer).items())
    assert_same_weights(trainer, expected)
    assert type(trainer.optimizer) is type(expected.optimizer)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_optimizer_fits_the_line_the_same(tmp_path, name):
    """The same on the two scalars of the line, whose gradients are scalars too: no optimizer may lose their shape."""

    def build():
        return line_trainer(tmp_path, learning_rate=0.1, optim=name)

    assert_same_weights(trained(build), trained_plain(build))


def test_an_optimizer_and_a_schedule_of_the_users_own(tmp_path):
    """After `test_custom_optimizer`: they are used as given, and the rate stays where the schedule holds it."""

    def build():
        model = Line()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=lambda step: 1.0)
        return Trainer(model, arguments(tmp_path), train_dataset=Points(), optimizers=(optimizer, schedule))

    trainer = trained(build)
    assert_same_weights(trainer, trained_plain(build))
    assert not torch.allclose(trainer.model.a, trained_plain(lambda: line_trainer(tmp_path, learning_rate=0.1)).model.a)
    assert trainer.optimizer.state_dict()["param_groups"][0]["lr"] == 1.0


def test_an_optimizer_class_with_its_arguments(tmp_path):
    """After the `optimizer_cls_and_kwargs` of the Trainer: a class that knows nothing of `found_inf`."""

    def build():
        given = {"optimizer_cls_and_kwargs": (torch.optim.Rprop, {"lr": 0.05})}
        return line_trainer(tmp_path, extras=given)

    trainer = trained(build)
    assert isinstance(trainer.optimizer.optimizer, torch.optim.Rprop)
    assert_same_weights(trainer, trained_plain(build))


def test_adafactor_without_a_learning_rate(tmp_path):
    """After `test_adafactor_lr_none`: the rate is the optimizer's own, and its schedule only shows it."""

    def build():
        model = Line()
        optimizer = Adafactor(model.parameters(), scale_parameter=True, relative_step=True, warmup_init=True, lr=None)
        given = (optimizer, AdafactorSchedule(optimizer))
        return Trainer(model, arguments(tmp_path), train_dataset=Points(), optimizers=given)

    trainer = trained(build)
    assert_same_weights(trainer, trained_plain(build))
    assert trainer.optimizer.state_dict()["param_groups"][0]["lr"] > 0


def test_the_learning_rates_can_be_asked_for(tmp_path):
    """After `test_get_learning_rates`: not before there is an optimizer."""
    trainer = Trainer(Line(), arguments(tmp_path))
    with pytest.raises(ValueError):
        trainer.get_learning_rates()
    trainer.create_optimizer()
    assert trainer.get_learning_rates() == [5e-05, 5e-05]


def rates(trainer):
    return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("constant_with_warmup", {}),
        ("cosine_with_restarts", {"num_cycles": 2}),
        ("polynomial", {"power": 5.0, "lr_end": 1e-5}),
        ("cosine_with_min_lr", {"min_lr": 1e-5}),
        ("cosine_warmup_with_min_lr", {"min_lr": 1e-5}),
        ("warmup_stable_decay", {"num_decay_steps": 8}),
        ("inverse_sqrt", {}),
    ],
)
def test_a_schedule_runs_once_a_step(tmp_path, kind, more):
    """After `test_cosine_with_min_lr_scheduler` and its like, through a training: one rate a step, as unprotected."""

    def build():
        options = {"lr_scheduler_type": kind, "lr_scheduler_kwargs": more, "warmup_steps": 3, "logging_steps": 1}
        return line_trainer(tmp_path, learning_rate=0.2, **options)

    trainer, expected = trained(build), trained_plain(build)
    assert len(rates(trainer)) == STEPS
    assert rates(trainer) == rates(expected)
    assert len(set(rates(trainer))) > 3
    assert_same_weights(trainer, expected)


def test_a_schedule_gets_its_arguments(tmp_path):
    """After `test_lr_scheduler_kwargs`."""
    more = {"power": 5.0, "lr_end": 1e-5}
    options = {"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": more, "learning_rate": 0.2, "warmup_steps": 2}
    trainer = Trainer(Line(), arguments(tmp_path, **options), train_dataset=Points())
    trainer.create_optimizer_and_scheduler(num_training_steps=10)
    expected = get_polynomial_decay_schedule_with_warmup(trainer.optimizer, num_warmup_steps=2, num_training_steps=10, **more)
    assert trainer.lr_scheduler.lr_lambdas[0].args == expected.lr_lambdas[0].args
    assert trainer.lr_scheduler.lr_lambdas[0].keywords == expected.lr_lambdas[0].keywords


def test_warmup_climbs_and_cosine_falls(tmp_path):
    """After the GaLore tests of the displayed rate: up to the peak, and down to nothing."""
    options = {"learning_rate": 2e-4, "warmup_steps": 5, "lr_scheduler_type": "cosine", "logging_steps": 1, "max_steps": 20}
    trainer = Trainer(tiny_llama(), arguments(tmp_path, **options), train_dataset=Tokens())
    trainer.train()
    shown = rates(trainer)
    peak = shown.index(max(shown))
    assert max(shown) == 2e-4 and peak == 5
    assert all(one < following for one, following in pairwise(shown[: peak + 1]))
    assert all(one > following for one, following in pairwise(shown[peak:]))
    assert shown[-1] == pytest.approx(0, abs=5e-6)


class ShowsTheRate(Trainer):
    """Logs the rate with each evaluation, as soon as there is one."""

    def log(self, logs, *args, **kwargs):
        if hasattr(self.lr_scheduler, "_last_lr"):
            logs["learning_rate"] = self.lr_scheduler._last_lr[0]
        super().log(logs, *args, **kwargs)


def test_a_plateau_lowers_the_rate(tmp_path):
    """After `test_reduce_lr_on_plateau`: after more bad epochs than its patience the next rate is lower, else it is the same."""
    options = {"lr_scheduler_type": "reduce_lr_on_plateau", "lr_scheduler_kwargs": {"patience": 1}, "eval_strategy": "epoch"}

    def build():
        more = {"metric_for_best_model": "eval_loss", "num_train_epochs": 12, "learning_rate": 1.0}
        return line_trainer(tmp_path, trainer=ShowsTheRate, pretrained=False, **options, **more)

    trainer = trained(build)
    schedule = trainer.lr_scheduler
    assert isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau) and schedule.patience == 1
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == 12
    best, bad, lowered = evaluations[0]["eval_loss"], 0, 0
    for this, following in pairwise(evaluations[1:]):
        better = this["eval_loss"] < best * (1 - schedule.threshold)
        best, bad = (this["eval_loss"], 0) if better else (best, bad + 1)
        if bad > schedule.patience:
            assert following["learning_rate"] < this["learning_rate"]
            bad, lowered = 0, lowered + 1
        else:
            assert following["learning_rate"] == this["learning_rate"]
    assert lowered > 0
    assert_same_weights(trainer, trained_plain(build))


@pytest.mark.parametrize("kind", [torch.optim.lr_scheduler.ReduceLROnPlateau, GreedyLR])
def test_a_schedule_on_a_metric_keeps_its_arguments(tmp_path, kind):
    """After `test_reduce_lr_on_plateau_args` and `test_greedy_lr_args`."""
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = kind(optimizer, factor=0.8, patience=5, cooldown=2)
    options = {"eval_strategy": "epoch", "metric_for_best_model": "eval_loss"}
    data = {"train_dataset": Points(), "eval_dataset": Points()}
    trainer = Trainer(model, arguments(tmp_path, **options), optimizers=(optimizer, schedule), **data)
    trainer.train()
    assert isinstance(trainer.lr_scheduler, kind)
    assert (trainer.lr_scheduler.factor, trainer.lr_scheduler.patience, trainer.lr_scheduler.cooldown) == (0.8, 5, 2)


def test_the_greedy_schedule_moves_the_rate(tmp_path):
    """After `test_greedy_lr`."""
    options = {"lr_scheduler_type": "greedy", "lr_scheduler_kwargs": {"patience": 1, "factor": 0.5}, "eval_strategy": "epoch"}

    def build():
        more = {"metric_for_best_model": "eval_loss", "num_train_epochs": 10, "learning_rate": 0.2}
        return line_trainer(tmp_path, trainer=ShowsTheRate, pretrained=False, **options, **more)

    trainer = trained(build)
    assert isinstance(trainer.lr_scheduler, GreedyLR)
    assert len(set(rates(trainer))) > 1
    assert_same_weights(trainer, trained_plain(build))
