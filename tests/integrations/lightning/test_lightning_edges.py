"""Lightning's Trainer, protected, at the edges: steps that a module takes in its own way, several optimizers, second fits."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

import nanproof
from integrations.lightning_toys import (
    BAD,
    BATCH,
    LIGHTNINGS_OWN_WARNINGS,
    PACKAGES,
    STEPS,
    fit,
    same,
    samples,
    toy,
    trainer_of,
    weights,
)
from nanproof.integrations.lightning._trainer import NanproofCallback, protect_trainer
from toys import net

pytestmark = LIGHTNINGS_OWN_WARNINGS


def test_the_modules_own_clipping_is_taken_over():
    """A module that overrides `configure_gradient_clipping` and calls `clip_gradients` gets the guard's clipping."""

    def clipping(module):
        def configure(optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
            module.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")

        module.configure_gradient_clipping = configure
        return module

    plain, guarded = (clipping(toy("lightning.pytorch", optimizer="sgd")) for _ in range(2))
    fit(plain, samples(bad=False), protect=False)
    _, guard = fit(guarded, samples(bad=True))
    assert [i.step for i in guard.incidents] == [BAD]
    guarded = clipping(toy("lightning.pytorch", optimizer="sgd"))
    fit(guarded, samples(bad=False))
    a, b = weights(plain), weights(guarded)
    assert all(torch.allclose(a[k], b[k], atol=1e-6, rtol=0) for k in a)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_training_step_may_return_none(accumulate):
    """Lightning leaves the batch out; so does the guard, and what was accumulated before it is stepped on."""
    settings = {"accumulate_grad_batches": accumulate}
    plain, guarded = (toy("lightning.pytorch", dropout=0.0, none_at=(3, 7, 8)) for _ in range(2))
    fit(plain, samples(bad=False), protect=False, **settings)
    _, guard = fit(guarded, samples(bad=False), **settings)
    assert not guard.incidents
    taken = [0, 1, 2, 4, 5, 6, 9, 10, 11] if accumulate == 1 else [0, 1, 2, 3, 4, 5]
    assert [r.step for r in guard.history] == taken
    assert same(weights(plain), weights(guarded)) and plain.rates == guarded.rates


def test_the_module_may_choose_not_to_step():
    """With an `optimizer_step` of its own. Lightning counts such a step and advances the schedule; so does a guarded run."""

    def choosy(module):
        def optimizer_step(epoch, batch_idx, optimizer, closure):
            if batch_idx % 3 == 1:
                closure()
            else:
                optimizer.step(closure=closure)

        module.optimizer_step = optimizer_step
        return module

    plain, guarded = (choosy(toy("lightning.pytorch")) for _ in range(2))
    fit(plain, samples(bad=True, without=(BAD,)), protect=False)
    fit(guarded, samples(bad=True, without=(BAD,)))
    assert same(weights(plain), weights(guarded)) and plain.rates == guarded.rates
    _, guard = fit(choosy(toy("lightning.pytorch")), samples(bad=True))
    assert [i.step for i in guard.incidents] == [BAD]
    assert [r.step for r in guard.history] == [i for i in range(STEPS) if i % 3 != 1]


def test_everything_is_given_back():
    """After a fit that was halted: methods, schedule frequencies, and the exception that says why."""
    module = toy("lightning.pytorch", every=2)
    data = samples(bad=True)
    data.tensors[0][:] = float("nan")
    trainer = trainer_of("lightning.pytorch")
    guard = protect_trainer(trainer, policy=nanproof.Policy(max_consecutive_skips=3))
    before = weights(module)
    with pytest.raises(nanproof.TrainingHalted):
        trainer.fit(module, DataLoader(data, batch_size=BATCH))
    assert [i.action for i in guard.incidents][-1] == "halted"
    assert same(before, weights(module))
    for thing in (trainer, trainer.strategy, trainer.precision_plugin):
        assert not {"optimizer_step", "backward", "training_step", "save_checkpoint", "clip_gradients"} & set(vars(thing))
    assert trainer.lr_scheduler_configs[0].frequency == 2


def test_an_exception_in_the_step_is_looked_into():
    module = toy("lightning.pytorch")
    data = samples(bad=False)
    data.tensors[1][BAD * BATCH] = 0
    real = module.training_step

    def failing(batch, batch_idx):
        if batch_idx == BAD:
            raise RuntimeError("boom")
        return real(batch, batch_idx)

    module.training_step = failing
    trainer = trainer_of("lightning.pytorch")
    guard = protect_trainer(trainer)
    with pytest.raises(RuntimeError, match="boom"):
        trainer.fit(module, DataLoader(data, batch_size=BATCH))
    assert [(i.step, i.kind) for i in guard.incidents] == [(BAD, "exception")]
    assert trainer.callbacks[0].state_dict()["guards"][0]["step"] == BAD  # for a checkpoint that is saved on exceptions


def test_one_callback_for_both_packages():
    bases = [importlib.import_module(package).Callback for package in PACKAGES]
    callback = NanproofCallback(policy=nanproof.Policy(lag=0))
    assert all(isinstance(callback, base) for base in bases)
    assert callback.state_key == "NanproofCallback" and callback.guard.path == "not started"


def test_a_second_fit_and_a_second_guard():
    """The guard starts again with the next fit; a trainer has one."""
    trainer = trainer_of("lightning.pytorch")
    guard = protect_trainer(trainer)
    with pytest.raises(nanproof.UsageError, match="already"):
        protect_trainer(trainer)
    for _ in range(2):
        trainer.fit(toy("lightning.pytorch"), DataLoader(samples(bad=True), batch_size=BATCH))
        trainer.fit_loop.epoch_progress.reset()
    assert len(guard.incidents) == 2


def test_a_closure_that_is_run_twice():
    """Guarded, though such a step cannot be run again."""

    def twice(module):
        def optimizer_step(epoch, batch_idx, optimizer, closure):
            closure()
            optimizer.step(closure=closure)

        module.optimizer_step = optimizer_step
        return module

    plain, guarded = (twice(toy("lightning.pytorch")) for _ in range(2))
    fit(plain, samples(bad=False), protect=False)
    fit(guarded, samples(bad=False))
    assert same(weights(plain), weights(guarded)) and plain.rates == guarded.rates
    for lag in (0, 2):
        module = twice(toy("lightning.pytorch"))
        _, guard = fit(module, samples(bad=True), policy=nanproof.Policy(lag=lag))
        assert [i.step for i in guard.incidents] == [BAD]
        # The refused step does not move the schedule; where that shows two steps late, a later one makes up for it.
        still = BAD + 1 + lag
        assert module.rates == [*plain.rates[:still], *plain.rates[still - 1 : -1]]
    assert all(torch.isfinite(v).all() for v in module.state_dict().values())


def test_another_schedule_may_take_the_place_of_one():
    """Weight averaging puts its own into the trainer: a guarded run follows."""
    import lightning.pytorch as L

    modules = [toy("lightning.pytorch", interval="epoch") for _ in range(2)]
    for module, protect in zip(modules, (False, True), strict=True):
        average = L.callbacks.StochasticWeightAveraging(1e-3, swa_epoch_start=1, annealing_epochs=2)
        fit(module, samples(bad=False), protect=protect, max_epochs=4, callbacks=[average])
    assert modules[0].rates == modules[1].rates


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`.*")
def test_a_step_that_draws_its_batches_itself():
    """With `dataloader_iter` nobody knows the batch beforehand: refused and attributed, and the schedule waits."""

    class Drawing(type(toy("lightning.pytorch"))):
        def training_step(self, dataloader_iter):
            (x, y), _, _ = next(dataloader_iter)
            return F.mse_loss(self.net(x).squeeze(-1), y)

    module = Drawing()
    trainer, guard = fit(module, samples(bad=True))
    (incident,) = guard.incidents
    assert (incident.step, incident.action) == (BAD, "skipped") and "net.0.weight" in dict(incident.culprits)
    assert all(torch.isfinite(v).all() for v in module.state_dict().values())
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == STEPS - 1


class TestManual:
    """Manual optimization: every optimizer has a guard; the incidents are in one list."""

    def gan(self, package="lightning.pytorch", toggle=True):
        L = importlib.import_module(package)

        class Gan(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.automatic_optimization = False
                self.generator, self.critic = nn.Linear(6, 6), net(dropout=0.0)

            def training_step(self, batch, batch_idx):
                g, c = self.optimizers()
                x = batch[0]
                if toggle:
                    self.toggle_optimizer(g)
                g.zero_grad()
                self.manual_backward(-self.critic(self.generator(torch.randn_like(x))).mean())
                self.clip_gradients(g, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
                g.step()
                if toggle:
                    self.untoggle_optimizer(g)
                    self.toggle_optimizer(c)
                c.zero_grad()
                self.manual_backward(self.critic(x).mean() - self.critic(self.generator(x).detach()).mean())
                c.step()
                if toggle:
                    self.untoggle_optimizer(c)

            def configure_optimizers(self):
                return (
                    torch.optim.Adam(self.generator.parameters(), lr=1e-2, fused=True),
                    torch.optim.SGD(self.critic.parameters(), lr=1e-2, fused=True),
                )

        torch.manual_seed(0)
        return Gan()

    @pytest.mark.parametrize("toggle", [True, False])
    def test_two_optimizers(self, toggle):
        """Only the critic sees the data: its step is refused, exactly, and the generator's is taken."""
        module = self.gan(toggle=toggle)
        fit(module, samples(bad=True), protect=False)
        assert not torch.isfinite(module.critic[0].weight).all()

        module = self.gan(toggle=toggle)
        trainer = trainer_of("lightning.pytorch")
        guard = protect_trainer(trainer)
        critics = []
        module.on_train_batch_end = lambda *args: critics.append({k: v.clone() for k, v in module.critic.state_dict().items()})
        trainer.fit(module, DataLoader(samples(bad=True), batch_size=BATCH))
        assert all(torch.isfinite(v).all() for v in module.state_dict().values())
        (incident,) = guard.incidents
        assert (incident.step, incident.action) == (BAD, "skipped")
        assert {name.partition(".")[0] for name, _ in incident.culprits} == {"critic"}
        parameters = [k for k in critics[0] if k.endswith(("weight", "bias"))]
        assert all(torch.equal(critics[BAD - 1][k], critics[BAD][k]) for k in parameters)
        assert not torch.equal(critics[BAD][parameters[0]], critics[BAD + 1][parameters[0]])
        callback = next(c for c in trainer.callbacks if isinstance(c, NanproofCallback))
        assert [len(g.history) for g in callback.guards] == [STEPS, STEPS]
        assert [g.refused_so_far for g in callback.guards] == [0, 1]
        assert {"nanproof/grad_norm", "nanproof/grad_norm_1"} <= trainer.callback_metrics.keys()

    def test_a_healthy_run_is_lightnings_own(self):
        plain, guarded = self.gan(), self.gan()
        fit(plain, samples(bad=False), protect=False)
        fit(guarded, samples(bad=False))
        a, b = weights(plain), weights(guarded)
        assert all(torch.allclose(a[k], b[k], atol=1e-6, rtol=0) for k in a)


def _halves_its_batch(module):
    step = module.training_step

    def training_step(batch, batch_idx):
        batch[0].mul_(0.5)
        return step(batch, batch_idx)

    module.training_step = training_step


def _scales_gradients(event):
    def change(module):
        def scale(*_):
            for p in module.parameters():
                p.grad.mul_(0.1)

        setattr(module, event, scale)

    return change


@pytest.mark.parametrize(
    "change", [_halves_its_batch, _scales_gradients("on_after_backward"), _scales_gradients("on_before_optimizer_step")]
)
def test_what_cannot_be_done_twice_is_not(change):
    """A batch that the step writes into, gradients that a hook changes: late verdicts train as if the bad batch had never been
    there. (Steps behind it were run again with a batch halved twice, and without the hook.)"""
    made = []
    for data in (samples(bad=True), samples(bad=False, without=(BAD,))):
        module = toy("lightning.pytorch", optimizer="sgd", dropout=0.0, interval="epoch")
        change(module)
        _, guard = fit(module, data, policy=nanproof.Policy(lag=2))
        made.append(weights(module))
        assert len(guard.incidents) == (len(made) == 1)
    assert same(*made)
