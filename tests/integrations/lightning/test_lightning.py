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
from torch.utils.data import DataLoader, TensorDataset

import nanproof
from integrations.lightning_toys import (
    BAD,
    BATCH,
    LIGHTNINGS_OWN_WARNINGS,
    PACKAGES,
    SAMPLE,
    STEPS,
    fit,
    moments,
    same,
    samples,
    toy,
    trainer_of,
    weights,
)
from nanproof import read_steps
from nanproof.integrations.lightning._trainer import NanproofCallback, protect_trainer

pytestmark = LIGHTNINGS_OWN_WARNINGS


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


@pytest.mark.parametrize(("lag", "gone"), [(0, {BAD}), (2, {BAD, BAD + 1, BAD + 2})])
@pytest.mark.parametrize("bad_first", [False, True])
def test_averages_of_an_epoch_leave_out_refused_steps(lag, gone, bad_first):
    """Else EarlyStopping would end the run over a batch that did no harm. With late verdicts, the steps until then go too."""
    import lightning.pytorch as L

    class Averaging(type(toy("lightning.pytorch"))):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.log("mean", loss, on_step=False, on_epoch=True)
            self.log("most", loss, on_step=True, on_epoch=True, reduce_fx="max")
            return loss

    data = samples(bad=True)
    if bad_first:
        data = TensorDataset(*(t.roll(-BAD * BATCH, 0) for t in data.tensors))
        gone = {i - BAD for i in gone}
    module = Averaging()
    stop = L.callbacks.EarlyStopping("mean", patience=10)
    trainer, guard = fit(module, data, max_epochs=3, callbacks=[stop], policy=nanproof.Policy(lag=lag), log_every_n_steps=1)
    assert trainer.current_epoch == 3 and len(guard.incidents) == 3
    last = [float(loss) for i, loss in enumerate(module.outputs[-STEPS:]) if i not in gone]
    assert float(trainer.callback_metrics["mean"]) == pytest.approx(sum(last) / len(last), rel=1e-6)
    assert float(trainer.callback_metrics["most_epoch"]) == max(last)


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
    assert len(list(read_steps(tmp_path / "nanproof"))) == STEPS
    assert Path(guard.incidents[0].bundle).is_relative_to(tmp_path / "nanproof")


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
    # Where verdicts come late, ranks whose calls were recorded cannot agree in time to run steps again: random numbers go on.
    again = job == "trainer" or not lag
    assert bad[0]["incidents"] == bad[1]["incidents"] == [[BAD // accumulate, 1, "one-rank-nonfinite", SAMPLE]]
    assert same(bad[0]["weights"], bad[1]["weights"])
    assert same(bad[0]["weights"], clean["weights"]) or not again
    assert all(bool(torch.isfinite(p).all()) for p in bad[0]["weights"].values())
    assert clean["incidents"] == []
