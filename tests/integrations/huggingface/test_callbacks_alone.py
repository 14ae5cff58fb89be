"""Pins that a monitor among the callbacks is enough: alone it guards as `protect` does, bit for bit; with `observe_only` the run
ends as one without nanproof, bit for bit. However they are combined, a trainer has one guard."""

from __future__ import annotations

import copy
import math
import os
import shutil

import pytest
import torch
from transformers import Trainer, TrainerCallback

import nanproof
from integrations.tiny import Regression, all_finite, feature_rows, make_trainer, weights
from nanproof import Observe, Policy, UnsupportedError, UsageError, read_incidents, read_steps
from nanproof.integrations._observed import ObservedRun
from nanproof.integrations._protected import ProtectedRun
from nanproof.integrations.huggingface._observed import TrainerObserver
from nanproof.integrations.transformers import (
    ActivationMonitorCallback,
    GradientMonitorCallback,
    GradientMonitoringCallback,
    LossCheckCallback,
)

BAD = {9: math.nan}
"""A row of the third batch."""


def equal(a, b) -> bool:
    """Bit for bit, where NaN is NaN."""
    return a.keys() == b.keys() and all(torch.equal(a[k].nan_to_num(nan=7e7), b[k].nan_to_num(nan=7e7)) for k in a)


def trained(folder, *, rows=24, bad=None, callbacks=None, before=lambda trainer: None, **settings) -> Trainer:
    trainer = make_trainer(folder, Regression(), feature_rows(rows, bad), callbacks=callbacks, **settings)
    before(trainer)
    trainer.train()
    return trainer


def state(trainer) -> dict[str, torch.Tensor]:
    """Weights, buffers, moments and learning rate."""
    moments = trainer.optimizer.state_dict()["state"]
    found = {f"{i}.{name}": value for i, held in moments.items() for name, value in held.items()}
    return weights(trainer.model) | found | {"lr": torch.tensor(trainer.lr_scheduler.get_last_lr())}


def logged(trainer) -> list[str]:
    """What transformers itself logged, but for the clock."""
    own = [
        {k: v for k, v in log.items() if not k.startswith("nanproof/") and "runtime" not in k and "per_second" not in k}
        for log in trainer.state.log_history
    ]
    return [repr(sorted(log.items())) for log in own]


def guards_on(trainer) -> int:
    return sum(type(callback).__name__ == "_Watch" for callback in trainer.callback_handler.callbacks)


# -- alone ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2, "max_grad_norm": 1e-3}], ids=["plain", "parts"])
@pytest.mark.parametrize("bad", [None, BAD], ids=["healthy", "bad"])
def test_a_callback_alone_ends_as_a_protected_run_does(tmp_path, bad, settings):
    """Given to the trainer, added later, or as a class: weights, moments, schedule, logs and records of `protect`."""
    protected = trained(tmp_path / "protected", bad=bad, before=nanproof.protect, **settings)
    ways = {
        "given": {"callbacks": [GradientMonitorCallback()]},
        "added": {"before": lambda trainer: trainer.add_callback(LossCheckCallback())},
        "class": {"before": lambda trainer: trainer.add_callback(GradientMonitoringCallback)},
    }
    for name, way in ways.items():
        trainer = trained(tmp_path / name, bad=bad, **way, **settings)
        assert equal(state(trainer), state(protected)) and all_finite(trainer.model)
        assert logged(trainer) == logged(protected)
        guard = trainer.nanproof
        assert isinstance(guard, ProtectedRun) and guards_on(trainer) == 1 and guard.closed
        ours, theirs = ([(i.step, i.kind, i.action) for i in g.incidents] for g in (guard, protected.nanproof))
        assert ours == theirs == ([] if bad is None else [(2 // settings.get("gradient_accumulation_steps", 1), *SKIPPED)])
        assert [r.step for r in read_steps(tmp_path / name / "nanproof")] == [r.step for r in guard.history]


SKIPPED = ("nonfinite-loss", "skipped")


def test_the_activation_monitor_alone_makes_the_guard_observe(tmp_path):
    """With its own modules and interval, as under `protect`."""
    monitor = ActivationMonitorCallback(2, modules="head")
    trainer = trained(tmp_path, bad=BAD, callbacks=[monitor])
    assert all_finite(trainer.model) and monitor.bad == [2] and monitor.guard is trainer.nanproof
    assert trainer.nanproof.history[0].observed.sites == ("head",)


def test_a_trainer_without_these_callbacks_trains_as_before(tmp_path):
    """Once one was made, `Trainer.train` looks for them, and changes nothing where there is none."""
    GradientMonitorCallback()
    trainer = trained(tmp_path, bad=BAD)
    assert not hasattr(trainer, "nanproof") and not all_finite(trainer.model) and not (tmp_path / "nanproof").exists()


def test_the_last_records_are_read_where_verdicts_come_late(tmp_path):
    """On CUDA they come two steps later: at the end of the training they are in."""
    monitor = GradientMonitorCallback()
    trained(tmp_path, callbacks=[monitor], before=lambda trainer: nanproof.protect(trainer, policy=Policy(lag=2)))
    assert monitor.last.step == 5


def test_a_class_with_a_train_of_its_own_runs_it_once(tmp_path):
    """What it does around the trainer's own `train` is done once, also in a second training."""
    calls = []

    class Own(Trainer):
        def train(self, *args, **kwargs):
            calls.append("before")
            return super().train(*args, **kwargs)

    trainer = make_trainer(tmp_path, Regression(), feature_rows(8), cls=Own, callbacks=[GradientMonitorCallback()])
    trainer.train()
    assert calls == ["before"] and guards_on(trainer) == 1
    trainer.train()
    assert calls == ["before"] * 2 and guards_on(trainer) == 1


def test_a_train_that_never_calls_the_trainers_own_is_an_error(tmp_path):
    """No guard can be attached: it says what to do."""

    class Elsewhere(Trainer):
        def train(self):
            return self._inner_training_loop(args=self.args)

    trainer = make_trainer(tmp_path, Regression(), feature_rows(8), cls=Elsewhere, callbacks=[GradientMonitorCallback()])
    with pytest.raises(UsageError, match=r"GradientMonitorCallback.*hint: call nanproof.protect"):
        trainer.train()
    with pytest.raises(UsageError, match="check_every_n_steps=0"):
        GradientMonitorCallback(check_every_n_steps=0)


# -- one guard -----------------------------------------------------------------------------------------------------------------


def test_two_callbacks_share_one_guard(tmp_path):
    """And what each of them reports is what that guard recorded."""
    monitors = [GradientMonitorCallback(), ActivationMonitorCallback(1), LossCheckCallback()]
    trainer = trained(tmp_path, bad=BAD, callbacks=monitors)
    assert guards_on(trainer) == 1 and all(monitor.guard is trainer.nanproof for monitor in monitors)
    assert (monitors[0].bad_steps, monitors[1].bad, monitors[2].nonfinite) == (1, [2], [2])
    assert len(trainer.nanproof.incidents) == 1


@pytest.mark.parametrize("order", ["before", "after"])
def test_protect_beside_a_callback_is_the_one_guard(tmp_path, order):
    """Before the callback is added or after it: with the settings that `protect` was given."""
    monitor = GradientMonitorCallback()
    trainer = make_trainer(tmp_path, Regression(), feature_rows(24, BAD), callbacks=[] if order == "before" else [monitor])
    guard = nanproof.protect(trainer, policy=Policy(diagnose="never"), run_dir=None)
    if order == "before":
        trainer.add_callback(monitor)
    trainer.train()
    assert guards_on(trainer) == 1 and trainer.nanproof is guard is monitor.guard
    assert guard.incidents[0].diagnosis is None and not (tmp_path / "nanproof").exists()
    assert equal(state(trainer), state(trained(tmp_path / "b", bad=BAD, before=nanproof.protect)))


def test_training_twice_keeps_the_guard(tmp_path):
    """And `protect` after a training gives the guard that the callback attached."""
    monitor = GradientMonitorCallback()
    trainer = make_trainer(tmp_path / "a", Regression(), feature_rows(24, BAD), callbacks=[monitor])
    protected = make_trainer(tmp_path / "b", Regression(), feature_rows(24, BAD))
    nanproof.protect(protected)
    for _ in range(2):
        for each in (trainer, protected):
            torch.manual_seed(3)
            each.train()
        assert equal(state(trainer), state(protected)) and guards_on(trainer) == 1
    assert nanproof.protect(trainer) is trainer.nanproof is monitor.guard
    assert monitor.bad_steps == 2 == len(trainer.nanproof.incidents)


def test_resuming_is_that_of_a_protected_run(tmp_path):
    """A checkpoint that is damaged is passed over, and the end is that of the run without a break."""
    settings = {"save_strategy": "steps", "save_steps": 2}
    whole = trained(tmp_path / "whole", bad=BAD, callbacks=[GradientMonitorCallback()], **settings)
    folder = tmp_path / "again"
    shutil.copytree(tmp_path / "whole", folder)
    os.truncate(folder / "checkpoint-6" / "optimizer.pt", 100)
    trainer = make_trainer(folder, Regression(seed=5), feature_rows(24, BAD), callbacks=[GradientMonitorCallback()], **settings)
    trainer.train(resume_from_checkpoint=True)
    assert trainer._initial_global_step == 4 and guards_on(trainer) == 1
    assert equal(state(trainer), state(whole)) and trainer.nanproof.refused_in_all == 1


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_copy_of_the_trainer_has_its_own_guard(tmp_path, when):
    """Copied before its first training or after it: the copy trains the copy, guarded once."""
    monitor = GradientMonitorCallback()
    trainer = make_trainer(tmp_path / "a", Regression(), feature_rows(24, BAD), callbacks=[monitor])
    if when == "after":
        trainer.train()
    start = weights(trainer.model)
    twin = copy.deepcopy(trainer)
    twin.args.output_dir = str(tmp_path / "b")
    twin.train()
    assert equal(weights(trainer.model), start) and all_finite(twin.model) and not equal(weights(twin.model), start)
    assert guards_on(twin) == 1 and twin.nanproof is not getattr(trainer, "nanproof", None)
    trainer.train()
    assert monitor.guard is trainer.nanproof


def test_one_callback_serves_one_trainer_after_the_other(tmp_path):
    """It reads the run of the trainer that trains."""
    monitor = GradientMonitorCallback()
    for name in "ab":
        trainer = trained(tmp_path / name, bad=BAD, callbacks=[monitor])
        assert monitor.guard is trainer.nanproof and monitor.last.step == 5
    assert monitor.bad_steps == 2


# -- observe only --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient_accumulation_steps": 2, "max_grad_norm": 1e-3}, {"max_grad_norm": 0.0}],
    ids=["plain", "parts", "no clip"],
)
@pytest.mark.parametrize("bad", [None, BAD], ids=["healthy", "bad"])
def test_an_observed_run_ends_as_a_plain_one(tmp_path, bad, settings):
    """Weights, moments, schedule and every number that transformers logs. The bad step is recorded, and taken."""
    plain = trained(tmp_path / "plain", bad=bad, **settings)
    kinds = (GradientMonitorCallback, LossCheckCallback, ActivationMonitorCallback)
    monitors = [kind(observe_only=True) for kind in kinds]
    trainer = trained(tmp_path / "observed", bad=bad, callbacks=monitors, **settings)
    assert equal(state(trainer), state(plain)) and logged(trainer) == logged(plain)
    assert all_finite(trainer.model) is (bad is None)
    run = monitors[0].guard
    assert isinstance(run, ObservedRun) and all(monitor.guard is run for monitor in monitors) and not hasattr(trainer, "nanproof")
    steps = trainer.state.global_step
    assert [record.step for record in run.history] == list(range(steps))
    assert {record.action for record in run.history} <= {"stepped", "clipped"}
    assert [(i.step, i.kind, i.action) for i in run.incidents] == (
        [] if bad is None else [(2 // settings.get("gradient_accumulation_steps", 1), "nonfinite-loss", "recorded")]
    )
    assert [i.step for i in read_incidents(tmp_path / "observed" / "nanproof")] == [i.step for i in run.incidents]
    assert "nanproof/bad_gradient_steps" in trainer.state.log_history[-2]


def test_an_observed_run_records_what_a_guard_records(tmp_path):
    """Losses, norms by parameter before clipping, learning rates, and what was clipped by how much."""
    settings = {"gradient_accumulation_steps": 2, "max_grad_norm": 1e-2, "rows": 48}
    seen = trained(tmp_path / "a", callbacks=[GradientMonitorCallback(observe_only=True)], **settings)
    guarded = trained(tmp_path / "b", before=lambda t: nanproof.protect(t, policy=Policy(switch_to_fused=False)), **settings)
    run = next(c.guard for c in seen.callback_handler.callbacks if isinstance(c, GradientMonitorCallback))
    assert len(run.history) == 6
    for ours, theirs in zip(run.history, guarded.nanproof.history, strict=True):
        assert (ours.step, ours.names, ours.lr, ours.action) == (theirs.step, theirs.names, theirs.lr, theirs.action)
        # The guard clips by a division and torch by a product, so that weights differ in the last digit.
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-5) and ours.clip == pytest.approx(theirs.clip, rel=1e-4)
        assert list(ours.norms) == pytest.approx(list(theirs.norms), rel=1e-4, abs=1e-6)


def test_nothing_stays_behind_of_an_observer(tmp_path):
    """Not after a training, and not after one that raised."""

    class Failing(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            raise RuntimeError("boom")

    for extra in ([], [Failing()]):
        monitor = GradientMonitorCallback(observe_only=True)
        trainer = make_trainer(tmp_path, Regression(), feature_rows(8), callbacks=[monitor, *extra])
        before = list(trainer.callback_handler.callbacks)
        if extra:
            with pytest.raises(RuntimeError, match="boom"):
                trainer.train()
        else:
            trainer.train()
        assert trainer.callback_handler.callbacks == before
        assert not {"backward", "clip_grad_norm_"} & vars(trainer.accelerator).keys()


def test_an_observer_that_fails_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    """One warning, and the run goes on as it would have."""
    plain = trained(tmp_path / "plain")
    monkeypatch.setattr("nanproof.integrations._observed.judge", lambda *args, **kwargs: 1 / 0)
    trainer = trained(tmp_path / "observed", callbacks=[GradientMonitorCallback(observe_only=True)])
    assert equal(state(trainer), state(plain)) and caplog.text.count("cannot observe step 0: ZeroDivisionError") == 1
    monkeypatch.undo()
    caplog.clear()
    (tmp_path / "file" / "nanproof").parent.mkdir()
    (tmp_path / "file" / "nanproof").write_text("")
    trained(tmp_path / "file", callbacks=[GradientMonitorCallback(observe_only=True)])
    assert caplog.text.count("not observed") == 1
    caplog.clear()
    monkeypatch.setattr("nanproof.integrations._observed.RunningStats", lambda *args: 1 / 0)
    trainer = trained(tmp_path / "unstarted", callbacks=[GradientMonitorCallback(observe_only=True)])
    assert equal(state(trainer), state(plain)) and caplog.text.count("not observed: ZeroDivisionError") == 1


def test_a_run_that_stays_bad_is_warned_of_once(tmp_path, caplog):
    """One incident and one warning of each monitor, not one a step; all bad steps are counted."""
    monitors = [GradientMonitorCallback(observe_only=True), LossCheckCallback(observe_only=True)]
    trained(tmp_path, bad=BAD, callbacks=monitors)
    assert (monitors[0].bad_steps, monitors[1].nonfinite) == (4, [2, 3, 4, 5])
    assert len(monitors[0].guard.incidents) == 1 and caplog.text.count("step 2: ") == 3 == caplog.text.count("nanproof: step")


def test_halt_on_nan_ends_an_observed_run(tmp_path):
    """It was asked for; the bad step was taken before."""
    trainer = trained(tmp_path, bad=BAD, callbacks=[GradientMonitorCallback(halt_on_nan=True, observe_only=True)])
    assert trainer.state.global_step == 3 and not all_finite(trainer.model)


def test_one_callback_that_only_observes_is_enough_for_all(tmp_path):
    """It asks that nothing changes, so nothing does; the others read the same records."""
    monitors = [GradientMonitorCallback(), ActivationMonitorCallback(observe_only=True)]
    plain = trained(tmp_path / "plain", bad=BAD)
    trainer = trained(tmp_path / "observed", bad=BAD, callbacks=monitors)
    assert equal(state(trainer), state(plain)) and monitors[0].bad_steps == 4


def test_protect_guards_a_trainer_whose_callback_only_observes(tmp_path):
    """An explicit `protect` wins over `observe_only`."""
    monitor = GradientMonitorCallback(observe_only=True)
    trainer = trained(tmp_path, bad=BAD, callbacks=[monitor], before=lambda t: nanproof.protect(t, observe=Observe(every=1)))
    assert all_finite(trainer.model) and monitor.guard is trainer.nanproof and guards_on(trainer) == 1


def test_deepspeed_is_refused_before_training_and_not_observed(tmp_path, caplog):
    """It takes the step itself, with gradients that nobody else sees."""
    trainer = make_trainer(tmp_path, Regression(), feature_rows(8))
    trainer.is_deepspeed_enabled = True
    with pytest.raises(UnsupportedError, match="DeepSpeed"):
        nanproof.protect(trainer)
    assert not hasattr(trainer, "nanproof") and guards_on(trainer) == 0
    observer = TrainerObserver(trainer)
    observer.on_train_begin(trainer.args, trainer.state, trainer.control)
    observer.close()
    assert "not observed" in caplog.text and not observer.run.history


def test_a_limit_of_zero_clips_nothing(tmp_path):
    monitor = GradientMonitorCallback(observe_only=True)
    trained(tmp_path, callbacks=[monitor], max_grad_norm=0.0)
    assert {(record.action, record.clip) for record in monitor.guard.history} == {("stepped", 1.0)}


def test_a_training_that_begins_again_is_observed_once(tmp_path, monkeypatch):
    """As with a batch size that is found by trying."""
    plain = GradientMonitorCallback(observe_only=True)
    trained(tmp_path / "a", callbacks=[plain])
    begin = TrainerObserver.on_train_begin

    def twice(self, *args, **kwargs):
        begin(self, *args, **kwargs)
        begin(self, *args, **kwargs)

    monkeypatch.setattr(TrainerObserver, "on_train_begin", twice)
    again = GradientMonitorCallback(observe_only=True)
    trained(tmp_path / "b", callbacks=[again])
    assert [record.loss for record in again.guard.history] == [record.loss for record in plain.guard.history]
