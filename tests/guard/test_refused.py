"""What the guard refuses: the kind of each bad step, the parameters and the micro-batch that it names."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanproof
from guard.guarding import INF, NAN, gradient_fault, guarded
from toys import batches, mse, net, poison


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_bad_gradient_under_a_finite_loss_is_its_own_kind(value, lag):
    guard = guarded(net(batch_norm=False), loss_fn=gradient_fault(value), policy=nanproof.Policy(lag=lag))
    for i, batch in enumerate(batches(6)):
        guard.train_step([*batch, True] if i == 2 else batch)
    guard.close()
    [incident] = guard.incidents
    assert (incident.step, incident.kind, incident.action) == (2, "nonfinite-gradient", "skipped")
    assert math.isfinite(incident.loss)
    assert incident.culprits[0][0] == "0.weight" and not math.isfinite(incident.culprits[0][1])


@pytest.mark.parametrize("lag", [0, 2])
def test_a_gradient_that_was_bad_for_a_moment_is_named_although_a_replay_is_clean(lag):
    """With a lag the gradients themselves are gone when the host learns of it, and run again they are fine. Their norms are not
    gone: one gradient was infinite, which is something else than finite ones whose squares overflow."""
    model = net(batch_norm=False)
    guard = guarded(model, policy=nanproof.Policy(lag=lag))
    armed = []

    def flip(gradient):
        if not armed:
            return None
        armed.clear()
        gradient = gradient.clone()
        gradient.view(-1)[3] = torch.inf
        return gradient

    model[0].weight.register_hook(flip)
    for i, batch in enumerate(batches(8)):
        if i == 4:
            armed.append(True)
        guard.train_step(batch)
    guard.close()
    (incident,) = guard.incidents
    assert (incident.step, incident.kind) == (4, "nonfinite-gradient")
    assert [name for name, _ in incident.culprits] == ["0.weight"]
    assert incident.diagnosis.cause == "transient-fault"


@pytest.mark.parametrize("lag", [0, 2])
def test_finite_gradients_with_an_infinite_norm_are_another_kind(lag):
    guard = guarded(net(batch_norm=False), loss_fn=gradient_fault(1e25), policy=nanproof.Policy(lag=lag))
    for i, batch in enumerate(batches(6)):
        guard.train_step([*batch, True] if i == 2 else batch)
    guard.close()
    [incident] = guard.incidents
    assert (incident.step, incident.kind) == (2, "gradient-norm-overflow")
    assert incident.grad_norm == INF


def test_culprits_are_read_before_clipping_turns_every_gradient_bad():
    """Only the second layer's gradient is bad; clip_grad_norm_ would have made all of them NaN."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 1))
    guard = guarded(model)
    model[1].bias.register_hook(lambda g: g * NAN)
    guard.train_step(batches(1)[0])
    assert [name for name, _ in guard.incidents[0].culprits] == ["1.bias"]
    assert all(math.isfinite(n) for name, n in guard.history[0].by_parameter.items() if name != "1.bias")


def test_a_nan_loss_with_finite_gradients_is_refused():
    """A mean over nothing gives a NaN loss and gradients of exactly 0."""
    guard = guarded(net(dropout=0.0), loss_fn=lambda m, b: F.cross_entropy(m(b[0]).expand(-1, 3), b[1], ignore_index=-100))
    guard.train_step([torch.randn(8, 6), torch.full((8,), -100)])
    [incident] = guard.incidents
    assert incident.kind == "nonfinite-loss" and incident.culprits == ()
    assert "every gradient is finite" in incident.message
    assert guard.history[0].grad_norm == 0


def test_weights_that_were_bad_before_the_step_are_named():
    model = net()
    with torch.no_grad():
        model[4].weight[0, 3] = NAN
    guard = guarded(model)
    guard.train_step(batches(1)[0])
    assert guard.incidents[0].kind == "nonfinite-weight"
    assert "4.weight" in guard.incidents[0].message


def test_optimizer_state_that_is_bad_is_found_at_close():
    guard = guarded(net())
    guard.train_step(batches(1)[0])
    p = guard.model[0].weight
    guard.optimizer.state[p]["exp_avg_sq"][0, 0] = INF
    assert guard.incidents == []
    guard.close()
    assert guard.incidents[0].kind == "nonfinite-weight"
    assert "exp_avg_sq of 0.weight" in guard.incidents[0].message


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("own_backward", [True, False])
@pytest.mark.parametrize("bad", [0, 1, 3])
def test_a_bad_micro_batch_is_named(bad, own_backward, lag):
    """By its loss when guard.backward is used, else by what one early gradient looked like after each backward."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    with guarded(model, optimizer, policy=nanproof.Policy(lag=lag)) as guard:
        for step in range(4):
            optimizer.zero_grad()
            for i, batch in enumerate(batches(4, seed=step)):
                loss = mse(model, poison(batch) if (step, i) == (2, bad) else batch) / 4
                guard.backward(loss) if own_backward else loss.backward()
            guard.step(loss)
    assert [(i.step, i.micro_batch) for i in guard.incidents] == [(2, bad)]


def test_a_micro_batch_with_a_bad_loss_and_finite_gradients_is_not_missed():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    guard = guarded(model, optimizer)
    for i, batch in enumerate(batches(3)):
        loss = mse(model, batch)
        guard.backward(loss + INF if i == 1 else loss)
    guard.step(loss)
    [incident] = guard.incidents
    assert (incident.kind, incident.micro_batch) == ("nonfinite-loss", 1)


def test_micro_batches_that_the_loop_gave_up_are_forgotten():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    guard = guarded(model, optimizer)
    data = batches(2)
    optimizer.zero_grad()
    guard.backward(mse(model, poison(data[0])))
    optimizer.zero_grad()
    for module in model:
        if isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats()
    guard.parts.stepper.buffers.refresh()
    loss = mse(model, data[1])
    guard.backward(loss)
    guard.step()
    assert guard.incidents == [] and guard.history[0].loss == pytest.approx(loss.item())


@pytest.mark.parametrize("scaled", [True, False])
def test_a_loss_of_one_element_is_a_scalar(scaled):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0) if scaled else None
    guard = guarded(net(), scaler=scaler, loss_fn=lambda m, b: mse(m, b).reshape(1))
    guard.train_step(batches(1)[0])
    assert guard.history[0].action != "skipped"


def test_the_accumulated_loss_is_the_mean():
    guard = guarded(net(dropout=0.0, batch_norm=False))
    data = batches(4)
    expected = sum(mse(guard.model, b).item() for b in data) / 4
    assert guard.train_step(*data).item() == pytest.approx(expected)


def test_incidents_are_logged_as_warnings(caplog):
    guarded().train_step(poison(batches(1)[0]))
    assert any("step 0: nonfinite-loss, skipped" in message for message in caplog.messages)
