"""Lightning's Trainer, protected: a bad batch leaves no trace in weights, moments, schedule or random numbers, whatever the
optimizer, the accumulation and the precision; a healthy run is Lightning's own, bit for bit."""

from __future__ import annotations

import csv
import importlib
import socket
from pathlib import Path

import lightning_ranks
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nanproof
from nanproof.integrations.lightning import NanproofCallback, protect_trainer
from toys import net

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*does not have many workers.*",
    "ignore:.*`isinstance\\(treespec, LeafSpec\\)` is deprecated.*",
    "ignore:.*number of training batches.*is smaller than the logging interval.*",
    "ignore:.*returned `None`.*",
    "ignore:.*use of fork.*:DeprecationWarning",
    "ignore:.*callbacks used to create the checkpoint.*",
)
PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
BATCH, STEPS = 8, 12
BAD = 5
"""The bad batch, and which of its samples is."""
SAMPLE = 3


def samples(bad: bool, without: tuple[int, ...] = ()) -> TensorDataset:
    """Twelve batches; `bad`: one NaN in one sample of one; `without`: batches that were never there."""
    g = torch.Generator().manual_seed(3)
    x = torch.randn(STEPS * BATCH, 6, generator=g)
    y = x.sum(1)
    if bad:
        x[BAD * BATCH + SAMPLE, 2] = float("nan")
    keep = [i for i in range(len(x)) if i // BATCH not in without]
    return TensorDataset(x[keep], y[keep])


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
}


def toy(package: str, *, optimizer: str = "adamw", every: int = 1, interval: str = "step", dropout: float = 0.2, none_at=()):
    """A module that counts what it is made to do."""
    L = importlib.import_module(package)

    class Toy(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(dropout)
            self.outputs: list[torch.Tensor] = []
            self.rates: list[float] = []
            self.seen: dict[str, torch.Tensor] = {}

        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self.net(batch[0]).squeeze(-1), batch[1])
            self.outputs.append(loss.detach())
            self.seen["x"] = batch[0]
            self.log("loss", loss)
            return None if batch_idx in none_at else loss

        def on_train_batch_start(self, batch, batch_idx):
            self.rates.append(self.optimizers().param_groups[0]["lr"])

        def configure_optimizers(self):
            optimizer_ = OPTIMIZERS[optimizer](self.parameters())
            schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer_, 0.9)
            return [optimizer_], [{"scheduler": schedule, "interval": interval, "frequency": every}]

    torch.manual_seed(0)
    return Toy()


def trainer_of(package: str, **settings):
    L = importlib.import_module(package)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    return L.Trainer(**{"max_epochs": 1, "accelerator": "cpu", "devices": 1, **quiet, **settings})


def fit(module, data, *, package="lightning.pytorch", protect=True, policy=None, **settings):
    """Returns trainer and guard after a fit; random numbers of the fit always start alike."""
    trainer = trainer_of(package, **settings)
    guard = protect_trainer(trainer, policy=policy) if protect else None
    torch.manual_seed(1)
    trainer.fit(module, DataLoader(data, batch_size=BATCH))
    return trainer, guard


def weights(module) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in module.state_dict().items()}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def moments(trainer) -> list[torch.Tensor]:
    return [v for state in trainer.optimizers[0].state.values() for v in state.values() if isinstance(v, torch.Tensor)]


@pytest.mark.parametrize("package", PACKAGES)
def test_a_bad_batch_kills_an_unprotected_run_and_not_a_protected_one(package, tmp_path):
    """Weights, incident with step, cause and sample, what Lightning's logger shows: for both names of the package."""
    L = importlib.import_module(package)
    module = toy(package)
    fit(module, samples(bad=True), package=package, protect=False)
    assert not all(torch.isfinite(p).all() for p in module.parameters())

    module, logger = toy(package), L.loggers.CSVLogger(tmp_path)
    trainer, guard = fit(module, samples(bad=True), package=package, logger=logger, log_every_n_steps=1)
    assert all(torch.isfinite(v).all() for v in module.state_dict().values())
    (incident,) = guard.incidents
    assert (incident.step, incident.kind, incident.action) == (BAD, "nonfinite-loss", "skipped")
    assert (incident.diagnosis.cause, incident.diagnosis.samples) == ("nonfinite-batch", (SAMPLE,))
    assert [r.step for r in guard.history] == list(range(STEPS))
    assert trainer.callback_metrics["nanproof/skipped"] == trainer.callback_metrics["nanproof/incidents"] == 1
    lines = (Path(logger.log_dir) / "metrics.csv").read_text().splitlines()
    rows = [row for row in csv.DictReader(lines) if row["nanproof/skipped"]]
    assert [float(r["nanproof/skipped"]) for r in rows] == [0.0] * BAD + [1.0] * (STEPS - BAD)
    norms = [float(r["nanproof/grad_norm"]) for r in rows]
    assert norms == pytest.approx([r.grad_norm for r in guard.history], nan_ok=True)


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_the_run_that_never_saw_the_bad_batch(optimizer, accumulate, lag):
    """Bit for bit: weights, buffers, moments, learning rate. With dropout, a schedule that moves every other step, two epochs;
    also with verdicts that come late, as on CUDA, so that steps behind the bad one are run again."""
    gone = (BAD,) if accumulate == 1 else (4, 5)
    policy = nanproof.Policy(lag=lag)
    settings = {"max_epochs": 2, "accumulate_grad_batches": accumulate, "gradient_clip_val": 1.0, "policy": policy}
    module, clean = (toy("lightning.pytorch", optimizer=optimizer, every=2 * accumulate) for _ in range(2))
    trainer, guard = fit(module, samples(bad=True), **settings)
    other, healthy = fit(clean, samples(bad=False, without=gone), **settings)
    assert [(i.step, i.micro_batch) for i in guard.incidents] == (
        [(5, None), (17, None)] if accumulate == 1 else [(2, 1), (8, 1)]
    )
    assert not healthy.incidents
    assert same(weights(module), weights(clean))
    assert all(torch.equal(a, b) for a, b in zip(moments(trainer), moments(other), strict=True))
    assert trainer.optimizers[0].param_groups[0]["lr"] == other.optimizers[0].param_groups[0]["lr"]


@pytest.mark.parametrize(
    ("accumulate", "every", "interval"), [(1, 1, "step"), (1, 5, "step"), (2, 3, "step"), (5, 1, "step"), (1, 1, "epoch")]
)
def test_a_healthy_run_is_lightnings_own(accumulate, every, interval):
    """Bit for bit, with the same kernel and no clipping; the learning rate at every batch, too."""
    settings = {"max_epochs": 2, "accumulate_grad_batches": accumulate}
    plain, guarded = (toy("lightning.pytorch", every=every, interval=interval) for _ in range(2))
    trainer, _ = fit(plain, samples(bad=False), protect=False, **settings)
    other, guard = fit(guarded, samples(bad=False), **settings)
    assert same(weights(plain), weights(guarded))
    assert plain.rates == guarded.rates
    assert guard.next_step == other.global_step == trainer.global_step


def test_clipping_is_replaced():
    """Weights as with Lightning's own clipping, `trainer.gradient_clip_val` stays what it is, norms are those before clipping."""
    plain, guarded, unclipped = (toy("lightning.pytorch", optimizer="sgd") for _ in range(3))
    fit(plain, samples(bad=False), protect=False, gradient_clip_val=0.1)
    trainer, guard = fit(guarded, samples(bad=False), gradient_clip_val=0.1)
    fit(unclipped, samples(bad=False))
    a, b, c = weights(plain), weights(guarded), weights(unclipped)
    assert all(torch.allclose(a[k], b[k], atol=1e-6, rtol=0) for k in a) and not torch.allclose(
        a["net.0.weight"], c["net.0.weight"]
    )
    assert trainer.gradient_clip_val == 0.1
    assert all(r.grad_norm > 0.1 for r in guard.history)


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


def test_clipping_by_value_is_refused():
    trainer = trainer_of("lightning.pytorch", gradient_clip_val=0.5, gradient_clip_algorithm="value")
    with pytest.raises(nanproof.UnsupportedError, match=r'"value".*infinite'):
        protect_trainer(trainer)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "64-true"])
def test_other_precisions(precision):
    """Forward under the plugin's context, also when the step is run again: the run that never saw the batch."""
    module, clean = (toy("lightning.pytorch", optimizer="adamw") for _ in range(2))
    _, guard = fit(module, samples(bad=True), precision=precision)
    fit(clean, samples(bad=False, without=(BAD,)), precision=precision)
    assert [(i.step, i.diagnosis.cause, i.diagnosis.samples) for i in guard.incidents] == [(BAD, "nonfinite-batch", (SAMPLE,))]
    assert same(weights(module), weights(clean))


@pytest.mark.parametrize("lag", [0, 2])
def test_mixed_precision_with_a_scaler(lag):
    """The plugin's GradScaler is the guard's: the run that never saw the batch, and Lightning's own where all is well."""
    from lightning.pytorch.plugins import MixedPrecision

    def run(data, protect=True, clip=None):
        module = toy("lightning.pytorch", optimizer="sgd")
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=4)
        plugins = [MixedPrecision("16-mixed", "cpu", scaler)]
        _, guard = fit(module, data, protect=protect, plugins=plugins, policy=nanproof.Policy(lag=lag), gradient_clip_val=clip)
        return weights(module), guard, scaler.get_scale()

    found, guard, scale = run(samples(bad=True), clip=1.0)
    clean, _, same_scale = run(samples(bad=False, without=(BAD,)), clip=1.0)
    assert [(i.step, i.diagnosis.cause) for i in guard.incidents] == [(BAD, "nonfinite-batch")]
    assert same(found, clean) and scale == same_scale
    found, _, scale = run(samples(bad=False))
    plain, _, same_scale = run(samples(bad=False), protect=False)
    assert scale == same_scale > 128
    assert all(torch.allclose(found[k], plain[k], atol=1e-5, rtol=0) for k in plain)


def test_running_a_step_again_leaves_no_trace_in_module_and_loops():
    """`self.log` and lists of outputs see each batch once although the bad step was run many times."""
    module = toy("lightning.pytorch")
    logged = []
    log = module.log
    module.log = lambda name, *args, **kwargs: (logged.append(name), log(name, *args, **kwargs))[1]
    trainer, guard = fit(module, samples(bad=True))
    assert guard.incidents[0].diagnosis.verified
    assert len(module.outputs) == STEPS and module.seen["x"].isfinite().all()
    assert logged.count("loss") == STEPS
    assert trainer.global_step == STEPS
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == STEPS


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


def test_resuming_from_lightnings_checkpoint(tmp_path):
    """Steps go on counting, statistics and schedule too: the same weights as without the break, bit for bit."""
    import lightning.pytorch as L

    def run(data, **settings):
        module = toy("lightning.pytorch", dropout=0.0, every=2)
        callback = NanproofCallback()
        trainer = trainer_of("lightning.pytorch", **{**settings, "callbacks": [callback, *settings.get("callbacks", [])]})
        ckpt_path = settings.pop("ckpt_path", None)
        trainer.fit(module, DataLoader(data, batch_size=BATCH), ckpt_path=ckpt_path)
        return module, callback.guard

    data = samples(bad=True)
    whole, guard = run(data, max_epochs=3)
    saver = L.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    first, _ = run(data, max_epochs=1, callbacks=[saver], enable_checkpointing=True)
    path = tmp_path / "epoch=0.ckpt"
    assert torch.load(path, weights_only=True)["callbacks"]["NanproofCallback"]["guards"][0]["step"] == STEPS

    module = toy("lightning.pytorch", dropout=0.0, every=2)
    trainer = trainer_of("lightning.pytorch", max_epochs=3)
    resumed = protect_trainer(trainer)
    trainer.fit(module, DataLoader(data, batch_size=BATCH), ckpt_path=path)
    assert [i.step for i in resumed.incidents] == [STEPS + BAD, 2 * STEPS + BAD]
    assert [i.step for i in guard.incidents] == [BAD, STEPS + BAD, 2 * STEPS + BAD]
    assert resumed.next_step == 3 * STEPS
    assert same(weights(module), weights(whole)) and not same(weights(first), weights(whole))


def test_lightnings_checkpoints_hold_settled_states(tmp_path):
    """Saved after every step: the same with verdicts that come late as with those that come at once, the bad step included."""
    import lightning.pytorch as L

    saved = {}
    for lag in (0, 2):
        saver = L.callbacks.ModelCheckpoint(tmp_path / str(lag), filename="{step}", save_top_k=-1, every_n_train_steps=1)
        settings = {"callbacks": [saver], "enable_checkpointing": True, "policy": nanproof.Policy(lag=lag)}
        fit(toy("lightning.pytorch"), samples(bad=True), **settings)
        paths = [tmp_path / str(lag) / f"step={i}.ckpt" for i in range(1, STEPS + 1)]
        saved[lag] = [torch.load(path, weights_only=True) for path in paths]
    for early, late in zip(saved[0], saved[2], strict=True):
        assert same(early["state_dict"], late["state_dict"])
        assert early["lr_schedulers"] == late["lr_schedulers"]
        assert early["callbacks"]["NanproofCallback"]["guards"][0]["step"] == early["global_step"]
    assert same(saved[0][BAD - 1]["state_dict"], saved[0][BAD]["state_dict"])


@pytest.mark.parametrize("package", PACKAGES)
def test_protect_knows_the_trainer(package, tmp_path):
    """`nanproof.protect(trainer)`; records go into the trainer's own folder."""
    trainer = trainer_of(package, default_root_dir=tmp_path)
    guard = nanproof.protect(trainer)
    assert (guard.path, guard.incidents, guard.history) == ("not started", [], [])
    trainer.fit(toy(package), DataLoader(samples(bad=True), batch_size=BATCH))
    assert len((tmp_path / "nanproof" / "steps.jsonl").read_text().splitlines()) == 1 + STEPS  # and a header
    assert Path(guard.incidents[0].bundle).is_relative_to(tmp_path / "nanproof")


def test_one_callback_for_both_packages():
    callback = NanproofCallback(policy=nanproof.Policy(lag=0))
    bases = [importlib.import_module(package).Callback for package in PACKAGES]
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


@pytest.mark.parametrize(("job", "accumulate", "lag"), [("trainer", 1, 0), ("trainer", 2, 2), ("fabric", 1, 0), ("fabric", 2, 2)])
def test_two_ranks(tmp_path, job, accumulate, lag):
    """A bad batch on rank 1 only: both refuse it, name rank 1, and end with the same weights as if it had never been."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # Forked: importing Lightning takes longer than the test.
    context = torch.multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=lightning_ranks.main, args=(rank, str(tmp_path), port, job, accumulate, lag)) for rank in range(2)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=60)
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0, 0]
    bad = [torch.load(tmp_path / f"bad{rank}.pt", weights_only=True) for rank in range(2)]
    clean = torch.load(tmp_path / "clean0.pt", weights_only=True)
    assert bad[0]["incidents"] == bad[1]["incidents"] == [[BAD // accumulate, 1, "one-rank-nonfinite", SAMPLE]]
    assert same(bad[0]["weights"], bad[1]["weights"])
    assert same(bad[0]["weights"], clean["weights"])
    assert clean["incidents"] == []
