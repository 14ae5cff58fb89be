"""Pins ObservedRun by itself: what it reads of a loop, beside a GradScaler, and that it touches nothing."""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch

from nanproof import _wording as wording
from nanproof import read_steps
from nanproof.integrations._observed import ObservedRun


def loop(run: ObservedRun | None, model, optimizer, scaler=None, steps=4, bad=(), times=1.0):
    """A plain loop; `bad`: steps with a NaN in the data; `times`: what the loss is multiplied with inside the backward."""
    torch.manual_seed(0)
    for step in range(steps):
        x = torch.randn(4, 3)
        x[0, 0] = math.nan if step in bad else x[0, 0]
        loss = model(x).square().mean() * times
        if run is not None:
            run.loss(loss)
        (loss if scaler is None else scaler.scale(loss)).backward()
        if run is not None:
            run.look()
            run.look()  # the second one finds nothing new
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if run is not None:
            run.end()
        optimizer.zero_grad()


def built():
    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("bad", [(), (1, 2)], ids=["healthy", "bad"])
def test_the_loop_is_the_same_with_and_without_it(tmp_path, bad):
    """Weights bit for bit; a gradient that is laid out in another order stays as it is; a second start goes on in the folder."""
    weights = []
    for observed in (False, True):
        model, optimizer = built()
        run = ObservedRun(tmp_path) if observed else None
        if run is not None:
            run.start(model, optimizer)
        loop(run, model, optimizer, bad=bad)
        if run is not None:
            run.close()
            assert [r.step for r in run.history] == [0, 1, 2, 3] and run.norm is not None
            assert [(i.step, i.action) for i in run.incidents] == [(step, "recorded") for step in bad[:1]]
            run.start(model, optimizer, step=4)
            loop(run, model, optimizer, steps=1)
            run.close()
            assert [r.step for r in read_steps(tmp_path)] == [0, 1, 2, 3, 4]
        else:
            loop(None, model, optimizer, steps=1)
        weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]).nan_to_num(nan=7e7))
    assert torch.equal(*weights)
    gradient = torch.randn(2, 3).t().contiguous().t()
    model.weight.grad = gradient
    run.start(model, optimizer)
    run.look()
    assert model.weight.grad is gradient and gradient.stride() == (1, 2)


def test_a_loss_scale_that_finds_its_level_is_not_an_incident():
    """The scaler leaves the step out, and the record says so. A NaN in the data is one."""
    model, optimizer = built()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=2.0**-90, growth_interval=100)
    run = ObservedRun()
    run.start(model, optimizer, scaler=scaler)
    loop(run, model, optimizer, scaler, steps=6, bad=(5,), times=8.0)
    actions = [record.action for record in run.history]
    assert actions == ["skipped", *["stepped"] * 4, "skipped"]
    assert [(i.step, i.kind) for i in run.incidents] == [(5, "nonfinite-loss")]
    assert run.account.accepted == 4 and wording.TAKEN not in run.incidents[0].message
    assert run.history[1].grad_norm < 1e3 and run.history[1].scale == 2.0**37


def test_parameters_that_join_are_followed():
    """The optimizer gets a group, and its gradients are in the records from then on."""
    model, optimizer = built()
    run = ObservedRun()
    run.start(model, optimizer)
    loop(run, model, optimizer, steps=1)
    extra = torch.nn.Parameter(torch.ones(2))
    optimizer.add_param_group({"params": [extra]})
    extra.grad = torch.full((2,), 3.0)
    run.look()
    run.end()
    assert run.history[-1].by_parameter["param_groups[1].params[0]"] == pytest.approx(18**0.5)


@pytest.mark.parametrize("fails", ["RunningStats", "judge", "nothing"])
def test_a_closed_observer_holds_no_model(monkeypatch, fails):
    """Also where it failed, at the start or at a step. It must not stop the run."""

    def broken(*args, **kwargs):
        raise RuntimeError

    model, optimizer = built()
    run = ObservedRun()
    if fails != "nothing":
        monkeypatch.setattr(f"nanproof.integrations._observed.{fails}", broken)
    assert run.start(model, optimizer) == (fails != "RunningStats")
    loop(run, model, optimizer)
    run.close()
    assert len(run.history) == (4 if fails == "nothing" else 0)
    ref = weakref.ref(model)
    del model, optimizer
    gc.collect()
    assert ref() is None
    run.start(*built())  # and a later run is observed as any other
    run.close()


def test_a_finite_loss_with_a_scale_below_one_is_not_the_scales_doing():
    model, optimizer = built()
    scaler = torch.amp.GradScaler("cpu", init_scale=0.5)
    run = ObservedRun()
    run.start(model, optimizer, scaler=scaler)
    loss = model(torch.randn(4, 3)).square().mean()
    run.loss(loss)
    scaler.scale(loss).backward()
    model.weight.grad[0, 0] = math.inf
    run.look()
    scaler.step(optimizer)
    scaler.update()
    run.end()
    assert [incident.kind for incident in run.incidents] == ["nonfinite-gradient"]


def test_a_run_that_goes_back_forgets_what_came_after():
    model, optimizer = built()
    run = ObservedRun()
    run.start(model, optimizer)
    loop(run, model, optimizer, steps=4)
    run.start(model, optimizer, step=2)
    loop(run, model, optimizer, steps=1)
    assert [record.step for record in run.history] == [0, 1, 2]


def test_the_bad_micro_batch_is_named():
    model, optimizer = built()
    run = ObservedRun()
    run.start(model, optimizer)
    for value in (1.0, math.nan):
        loss = model(torch.full((4, 3), value)).mean()
        run.loss(loss)
        loss.backward()
    run.look()
    run.end()
    (incident,) = run.incidents
    assert "micro-batch" in incident.message
