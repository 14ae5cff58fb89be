"""That the other tests of this folder say something: their Trainers are protected, and a plain one would have been lost."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from transformers import Trainer
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer

import nanproof
from integrations.huggingface.trainer.parts import (
    BATCH,
    POINTS,
    STEPS,
    Line,
    Points,
    Tokens,
    arguments,
    line_trainer,
    tiny_gpt2,
    trained_plain,
    weights,
)
from integrations.huggingface.trainer.protection import UNPROTECTED

pytestmark = pytest.mark.skipif(UNPROTECTED, reason="nobody is protected in this run")


def test_every_step_is_recorded(tmp_path, guards):
    """The fixture did its work: the guard has one record a step, with the loss and the norm that the Trainer logged."""
    trainer = line_trainer(tmp_path, learning_rate=0.1, logging_steps=1)
    trainer.train()
    (run,) = guards
    assert run.steps == STEPS
    assert [record.step for record in run.guard.history] == list(range(STEPS))
    logs = [entry for entry in trainer.state.log_history if "grad_norm" in entry]
    for record, entry in zip(run.guard.history, logs, strict=True):
        assert record.loss == pytest.approx(entry["loss"], rel=1e-5)
        assert record.grad_norm == pytest.approx(entry["grad_norm"], rel=1e-5)
        assert record.lr[0] == pytest.approx(entry["learning_rate"])
    assert run.guard.incidents == []


def test_the_oracle_is_not_protected(tmp_path, guards):
    """`trained_plain` is what it says, else every comparison of this folder compares a thing with itself."""
    trained_plain(lambda: line_trainer(tmp_path, max_steps=2))
    assert guards == []


def test_accumulated_steps_are_recorded_once(tmp_path, guards):
    """A step of four micro-batches is one record, and its loss is the step's."""
    options = {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 0.1}
    trainer = line_trainer(tmp_path, **options)
    trainer.train()
    (run,) = guards
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert [record.loss for record in run.guard.history] == pytest.approx(losses, rel=1e-5)


class OneBadPoint(Points):
    """Sample 20 has a label that is no number."""

    def __init__(self, value=math.nan):
        super().__init__()
        self.ys[0][20] = value


@pytest.mark.incidents
@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_bad_sample_costs_one_step_an_epoch(tmp_path, guards, value, accumulate):
    """The plain Trainer ends with weights that are no numbers; the protected one with finite ones, and names what it refused."""

    def build():
        options = {"learning_rate": 0.1, "gradient_accumulation_steps": accumulate, "train_sampling_strategy": "sequential"}
        return Trainer(Line(), arguments(tmp_path, **options), train_dataset=OneBadPoint(value))

    trainer = build()
    trainer.train()
    assert not all(torch.isfinite(p).all() for p in weights(trained_plain(build)).values())
    assert all(torch.isfinite(p).all() for p in weights(trainer).values())
    (run,) = guards
    an_epoch = POINTS // BATCH // accumulate
    bad = [20 // BATCH // accumulate + epoch * an_epoch for epoch in range(3)]
    assert [record.step for record in run.guard.history if record.action == "skipped"] == bad
    assert [incident.step for incident in run.guard.incidents] == bad
    assert trainer.state.global_step == STEPS // accumulate


@pytest.mark.incidents
def test_a_refused_step_does_not_advance_the_schedule(tmp_path, guards, caplog):
    """The rate after a refused step is the rate of that step: the schedule counts steps that were taken."""
    options = {"learning_rate": 0.1, "train_sampling_strategy": "sequential", "max_steps": 6}
    trainer = Trainer(Line(), arguments(tmp_path, **options), train_dataset=OneBadPoint())
    trainer.train()
    (run,) = guards
    assert [record.action == "skipped" for record in run.guard.history] == [False, False, True, False, False, False]
    taken = [record.lr[0] for record in run.guard.history if record.action != "skipped"]
    assert taken == pytest.approx([0.1 * (1 - step / 6) for step in range(5)])
    assert trainer.lr_scheduler.get_last_lr() == pytest.approx([0.1 / 6] * 2)
    assert caplog.text.count("5 steps taken, 1 refused") == 1


@pytest.mark.incidents
@pytest.mark.parametrize("filtered", [False, True])
def test_a_run_beyond_hope_is_halted(tmp_path, guards, filtered):
    """After `test_logging_inf_nan_filter`, with a deliberate change: a learning rate of 1e9 does not train to the end.

    The original trains on with weights that are no numbers, and looks for the NaN in the logs with and without
    `logging_nan_inf_filter`. Here every step after the first is refused, more than the policy allows, and the run is halted
    with the reason. The filter of the logs hides nothing from the guard.
    """
    options = {"learning_rate": 1e9, "logging_steps": 5, "logging_nan_inf_filter": filtered, "max_steps": 24}
    torch.manual_seed(0)
    trainer = Trainer(tiny_gpt2(), arguments(tmp_path, **options), train_dataset=Tokens())
    with pytest.raises(nanproof.TrainingHalted):
        trainer.train()
    guard = guards[0].guard
    assert any(not math.isfinite(record.loss) for record in guard.history)
    assert all(torch.isfinite(p).all() for p in weights(trainer).values())


def test_a_step_within_backward_is_put_back(tmp_path):
    """After `test_galore` layer by layer: the Trainer's optimizer is a dummy there, so there is no step to stand before."""

    def trained(data):
        model = Line()
        each = {p: torch.optim.SGD([p], lr=0.1, momentum=0.9) for p in model.parameters()}

        def step(p):
            each[p].step()
            each[p].zero_grad()

        for p in each:
            p.register_post_accumulate_grad_hook(step)
        optimizer = LayerWiseDummyOptimizer(optimizer_dict=each)
        given = (optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))
        trainer = Trainer(model, arguments(tmp_path), train_dataset=data, optimizers=given)
        trainer.get_train_dataloader = lambda: torch.utils.data.DataLoader(data, batch_size=8)
        guard = nanproof.protect(trainer)
        trainer.train()
        moments = [state["momentum_buffer"] for o in each.values() for state in o.state.values()]
        return guard, [t.detach().clone() for t in (*model.parameters(), *moments)]

    bad, good = Points(), Points()
    bad.x[9] = math.nan
    good.x, good.ys = np.delete(good.x, slice(8, 16)), [np.delete(y, slice(8, 16)) for y in good.ys]
    guard, saw = trained(bad)
    _, never = trained(good)
    assert guard.path.startswith("copy: optimizers step inside backward")
    assert {i.step for i in guard.incidents} == {1 + epoch * len(bad) // 8 for epoch in range(3)}
    assert all(torch.equal(a, b) for a, b in zip(saw, never, strict=True))


def test_an_optimizer_that_moves_weights_without_a_step_is_refused(tmp_path):
    """Nothing shows that LOMO has moved them, so there is no moment to judge."""

    class Lomo(torch.optim.SGD):
        pass

    model = Line()
    given = (Lomo(model.parameters(), lr=0.1), None)
    trainer = Trainer(model, arguments(tmp_path), train_dataset=Points(), optimizers=given)
    nanproof.protect(trainer)
    with pytest.raises(nanproof.UnsupportedError, match="Lomo moves weights inside backward, without a step"):
        trainer.train()


def test_protecting_twice_is_an_error(tmp_path):
    """A script that calls `protect` again is told so; never two guards over one step."""
    trainer = line_trainer(tmp_path, learning_rate=0.1)
    guard = nanproof.protect(trainer)
    with pytest.raises(nanproof.UsageError, match="protected already"):
        nanproof.protect(trainer)
    trainer.train()
    assert trainer.nanproof is guard and len(guard.history) == STEPS
