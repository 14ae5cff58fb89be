"""Pins that a fit with `NanproofCallback(observe_only=True)` ends as one without nanproof, bit for bit, and is recorded as a
guarded one is; and that callback and `protect` together are one guard."""

from __future__ import annotations

import copy
import importlib
import math
from types import SimpleNamespace

import lightning.pytorch  # noqa: F401  a callback is made for the packages that are imported
import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader

import nanproof
from integrations.lightning_toys import (
    BAD,
    BATCH,
    LIGHTNINGS_OWN_WARNINGS,
    PACKAGES,
    STEPS,
    moments,
    same,
    samples,
    toy,
    trainer_of,
    weights,
)
from nanproof import AlreadyGuarded, Policy, UsageError, read_steps
from nanproof.core.support._index import read_index
from nanproof.integrations._observed import ObservedRun
from nanproof.integrations._protected import ProtectedRun
from nanproof.integrations.lightning import NanproofCallback
from nanproof.integrations.lightning._observed import FitObserver

pytestmark = LIGHTNINGS_OWN_WARNINGS


def fitted(callbacks=(), *, bad=True, module=None, package="lightning.pytorch", before=lambda trainer: None, **settings):
    module = toy(package) if module is None else module
    trainer = trainer_of(package, callbacks=list(callbacks), **settings)
    before(trainer)
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(samples(bad), batch_size=BATCH))
    return trainer, module


def bits(trainer, module):
    held = {**weights(module), **{str(i): m for i, m in enumerate(moments(trainer))}}
    return {name: value.nan_to_num(nan=7e7) for name, value in held.items()}


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("bad", [False, True], ids=["healthy", "bad"])
def test_an_observed_fit_ends_as_a_plain_one(tmp_path, package, bad):
    """Weights, moments and what the module logs. The bad step is recorded, and taken."""
    settings = {"package": package, "bad": bad, "gradient_clip_val": 1e-2, "accumulate_grad_batches": 2}
    plain, plain_module = fitted(**settings)
    callback = NanproofCallback(observe_only=True, run_dir=tmp_path)
    trainer, module = fitted([callback], **settings)
    assert same(bits(trainer, module), bits(plain, plain_module)) and module.rates == plain_module.rates
    assert repr(trainer.callback_metrics["loss"]) == repr(plain.callback_metrics["loss"])
    run = callback.guard
    assert isinstance(run, ObservedRun) and [r.step for r in run.history] == list(range(STEPS // 2))
    assert [(i.step, i.kind, i.action) for i in run.incidents] == [(BAD // 2, "nonfinite-loss", "recorded")] * bad
    assert [r.step for r in read_steps(tmp_path)] == [r.step for r in run.history]
    assert trainer.callback_metrics["nanproof/incidents"] == bad and "nanproof/skipped" not in trainer.callback_metrics


def test_an_observed_fit_records_what_a_guard_records():
    """Losses, norms before clipping, and what was clipped by how much."""
    callback = NanproofCallback(observe_only=True)
    settings = {"bad": False, "gradient_clip_val": 1e-2}
    fitted([callback], **settings)
    guard = NanproofCallback()
    fitted([guard], **settings)
    assert len(callback.guard.history) == STEPS
    for ours, theirs in zip(callback.guard.history, guard.guard.history, strict=True):
        assert (ours.step, ours.names, ours.action, ours.lr) == (theirs.step, theirs.names, theirs.action, theirs.lr)
        assert ours.loss == pytest.approx(theirs.loss, rel=1e-4) and ours.clip == pytest.approx(theirs.clip, rel=1e-3)
        assert list(ours.norms) == pytest.approx(list(theirs.norms), rel=1e-3, abs=1e-6)


def test_every_optimizer_of_a_manual_fit_is_observed(tmp_path):
    """Each has its own records; incidents are in one list."""
    L = importlib.import_module("lightning.pytorch")

    class Pair(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(0)
            self.a, self.b = torch.nn.Linear(6, 1), torch.nn.Linear(6, 1)

        def training_step(self, batch, batch_idx):
            for net, optimizer in zip((self.a, self.b), self.optimizers(), strict=True):
                optimizer.zero_grad()
                x = batch[0].nan_to_num() if net is self.a else batch[0]
                self.manual_backward(F.mse_loss(net(x).squeeze(-1), batch[1]))
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(net.parameters(), lr=0.01) for net in (self.a, self.b)]

    _, plain = fitted(module=Pair())
    callback = NanproofCallback(observe_only=True, run_dir=tmp_path)
    _, module = fitted([callback], module=Pair())
    assert all(
        torch.equal(a.nan_to_num(7e7), b.nan_to_num(7e7)) for a, b in zip(plain.parameters(), module.parameters(), strict=True)
    )
    first, second = callback.guards
    assert [len(run.history) for run in callback.guards] == [STEPS, STEPS]
    assert all(math.isfinite(r.loss) for r in first.history) and not math.isfinite(second.history[BAD].loss)
    assert [(i.step, i.culprits[0][0]) for i in callback.guard.incidents] == [(BAD, "b.weight")]
    assert len(list(read_steps(tmp_path / "optimizer-2"))) == STEPS
    assert read_index(tmp_path) == [(tmp_path, "SGD of Pair (1)"), (tmp_path / "optimizer-2", "SGD of Pair (2)")]
    fitted([NanproofCallback(observe_only=True, run_dir=tmp_path)])
    assert read_index(tmp_path) == []  # one optimizer only


@pytest.mark.parametrize("error", [ValueError, UsageError])
def test_an_observer_that_cannot_start_does_not_stop_the_fit(monkeypatch, caplog, error):
    """One warning, and the fit goes on as it would have."""

    def fails(*args):
        raise error("no statistics")

    plain, plain_module = fitted()
    monkeypatch.setattr("nanproof.integrations._observed.RunningStats", fails)
    callback = NanproofCallback(observe_only=True)
    trainer, module = fitted([callback])
    assert same(bits(trainer, module), bits(plain, plain_module)) and caplog.text.count("no statistics") == 1
    assert callback.guard.history == [] and "nanproof/incidents" not in trainer.callback_metrics


def test_observing_needs_no_settings_of_a_guard():
    """They would be ignored."""
    with pytest.raises(UsageError, match="observe_only=True, policy="):
        NanproofCallback(observe_only=True, policy=Policy())


# -- one guard -----------------------------------------------------------------------------------------------------------------


def test_protect_after_the_callback_is_its_guard():
    """Without settings; with some, they could not be followed any more."""
    callback = NanproofCallback()
    trainer, module = fitted([callback], before=lambda t: setattr(t, "found", nanproof.protect(t)))
    assert trainer.found is callback.guard and len(trainer.callbacks) == 1
    alone, guarded = fitted([NanproofCallback()])
    assert same(bits(trainer, module), bits(alone, guarded))
    with pytest.raises(AlreadyGuarded, match="NanproofCallback"):
        nanproof.protect(trainer, policy=Policy(lag=0))


def test_a_callback_added_after_protect_shows_its_guard(tmp_path):
    """A step is wrapped once, and both show it."""
    late = NanproofCallback()
    guards = []

    def both(trainer) -> None:
        guards.append(nanproof.protect(trainer, run_dir=tmp_path))
        trainer.callbacks.append(late)

    trainer, module = fitted(before=both)
    alone, guarded = fitted([NanproofCallback()])
    assert same(bits(trainer, module), bits(alone, guarded))
    assert late.guard is guards[0] and late.guard.next_step == STEPS and len(late.guard.incidents) == 1


def test_protect_guards_a_trainer_whose_callback_only_observes():
    """With the settings that it is given."""
    callback = NanproofCallback(observe_only=True)
    _, module = fitted([callback], before=lambda t: nanproof.protect(t, policy=Policy(diagnose="never"), run_dir=None))
    assert isinstance(callback.guard, ProtectedRun) and callback.guard.incidents[0].action == "skipped"
    assert all(torch.isfinite(p).all() for p in module.parameters()) and callback.guard.incidents[0].diagnosis is None


@pytest.mark.parametrize("observe_only", [False, True])
def test_a_second_fit_and_a_copied_trainer(observe_only):
    """Each fit is guarded, or observed, once."""
    callback = NanproofCallback(observe_only=observe_only)
    trainer = trainer_of("lightning.pytorch", callbacks=[callback])
    for _ in range(2):
        trainer.fit(toy("lightning.pytorch"), DataLoader(samples(True), batch_size=BATCH))
        trainer.fit_loop.epoch_progress.reset()
    assert len(callback.guard.incidents) == 2
    twin = copy.deepcopy(trainer)
    twin.fit(toy("lightning.pytorch"), DataLoader(samples(True), batch_size=BATCH))
    own = next(c for c in twin.callbacks if isinstance(c, NanproofCallback))
    assert own is not callback and len(own.guard.incidents) == 3 and len(callback.guard.incidents) == 2


def observed(model, optimizers, scaler=None, **settings):
    """An observer of a fit that is not Lightning's, so that each of its settings can be set."""
    given = {"gradient_clip_algorithm": None, "gradient_clip_val": None, "global_step": 0, "is_global_zero": True} | settings
    strategy, precision = SimpleNamespace(model=model), SimpleNamespace(scaler=scaler)
    trainer = SimpleNamespace(
        optimizers=optimizers, strategy=strategy, precision_plugin=precision, lightning_module=model, **given
    )
    return FitObserver(trainer, ObservedRun())


def one_step(observer, model, *optimizers, scale=1.0):
    loss = model(torch.ones(4, 3)).square().mean()
    observer.before_backward(loss * scale)
    loss.backward()
    for optimizer in optimizers:
        observer.before_step(optimizer)
    observer.batch_ended()
    return loss.item()


def linear():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    return model, torch.optim.SGD(model.parameters(), 0.1)


def test_clipping_by_value_is_not_taken_for_clipping_by_norm():
    model, optimizer = linear()
    observer = observed(model, [optimizer], gradient_clip_algorithm="value", gradient_clip_val=1e-6)
    one_step(observer, model, optimizer)
    assert observer.runs[0].history[0].clip == 1.0


def test_several_optimizers_share_a_loss_and_a_step():
    """Lightning counts the steps of each."""
    model, optimizer = linear()
    other = torch.optim.SGD([model.bias], 0.1)
    observer = observed(model, [optimizer, other], global_step=6)
    loss = one_step(observer, model, optimizer, other)
    assert [(r.step, r.loss) for run in observer.runs for r in run.history] == [(3, pytest.approx(loss))] * 2


def test_the_loss_is_recorded_without_its_scale():
    model, optimizer = linear()
    observer = observed(model, [optimizer], torch.amp.GradScaler("cpu", init_scale=1024.0))
    loss = one_step(observer, model, optimizer, scale=1024.0)
    assert observer.runs[0].history[0].loss == pytest.approx(loss)
