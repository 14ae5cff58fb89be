"""Wrong use of the guard: an error that names the mistake, or a warning where training can go on."""

from __future__ import annotations

import copy

import pytest
import torch

import nanproof
from guard.guarding import NAN, guarded
from toys import batches, mse, net, poison


@pytest.mark.parametrize("max_norm", [0, -1.0, NAN, "on", True])
def test_a_max_norm_that_cannot_be_is_refused(max_norm):
    with pytest.raises(nanproof.UsageError, match="max_norm"):
        guarded(max_norm=max_norm)


def test_bad_use_gets_a_clear_error(tmp_path):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    frozen = net().requires_grad_(False)
    with pytest.raises(nanproof.UsageError, match="no trainable parameter"):
        nanproof.Guard(frozen, torch.optim.AdamW(frozen.parameters()))
    with pytest.raises(nanproof.UsageError, match="loss_fn"):
        nanproof.Guard(model, optimizer).train_step(batches(1)[0])
    with pytest.raises(nanproof.UsageError, match="call backward before"):
        nanproof.Guard(model, optimizer).step(torch.tensor(1.0))
    with pytest.raises(nanproof.UsageError, match="pass the loss"):
        nanproof.Guard(model, optimizer).step()
    with pytest.raises(nanproof.UsageError, match=r"scalar, not of shape \(8,\)"):
        guarded(model, optimizer, loss_fn=lambda m, b: m(b[0]).squeeze(-1)).train_step(batches(1)[0])
    with pytest.raises(nanproof.UsageError, match="must be a tensor, not float"):
        guarded(model, optimizer).backward(1.0)
    with pytest.raises(nanproof.UsageError, match="not an optimizer"):
        nanproof.Guard(model, model.parameters())
    with pytest.raises(nanproof.UnsupportedError, match=r"LBFGS moves weights before a step can be judged: .* at least .* B"):
        nanproof.Guard(model, torch.optim.LBFGS(model.parameters()), policy=nanproof.Policy(copy=False))
    with pytest.raises(nanproof.UsageError, match="ReduceLROnPlateau"):
        guarded(model, optimizer, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    with pytest.raises(nanproof.UsageError, match="Policy is needed, not dict"):
        guarded(model, optimizer, policy={"lag": 2})
    with pytest.raises(nanproof.UsageError, match="Module is needed, not list"):
        nanproof.Guard(list(model.parameters()), optimizer)
    with pytest.raises(nanproof.UsageError, match="scheduler is needed, not int"):
        guarded(model, optimizer, scheduler=[1])
    with pytest.raises(nanproof.UsageError, match="Checkpoints"):
        guarded(model, optimizer, checkpoints="folder")


def test_a_folder_that_cannot_be_written_is_refused_and_nothing_stays_behind(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(nanproof.UsageError, match="run_dir"):
        guarded(run_dir=tmp_path / "file" / "run")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_unknown_versions_of_the_state_are_refused():
    with pytest.raises(nanproof.UsageError, match="version 7"):
        guarded().load_state_dict({"version": 7})


def test_a_loss_that_was_not_scaled_is_noticed():
    model = net()
    guard = guarded(model, scaler=torch.amp.GradScaler("cpu"))
    loss = mse(model, batches(1)[0])
    loss.backward()
    with pytest.raises(nanproof.UsageError, match="the loss was not scaled"):
        guard.step(loss)


def test_a_step_of_ones_own_in_the_middle_of_train_steps_is_refused():
    guard = guarded(policy=nanproof.Policy(lag=2))
    guard.train_step(batches(1)[0])
    mse(guard.model, batches(1)[0]).backward()
    with pytest.raises(nanproof.UsageError, match=r"guard\.sync"):
        guard.step(torch.tensor(1.0))
    guard.sync()
    loss = mse(guard.model, batches(1)[0])
    loss.backward()
    guard.step(loss)


def test_gradients_left_over_from_a_refused_step_are_hinted_at():
    model = net(batch_norm=False)
    guard = guarded(model)
    for batch in (poison(batches(1)[0]), batches(1)[0]):
        loss = mse(model, batch)
        loss.backward()
        guard.step(loss)
    assert "was zero_grad called" in guard.incidents[1].message


def test_a_schedule_that_nobody_advances_is_warned_about(caplog):
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    guard = guarded(model, optimizer, scheduler=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))
    for batch in batches(3):
        optimizer.zero_grad()
        loss = mse(model, batch)
        loss.backward()
        guard.step(loss)
    assert any("call scheduler.step() yourself" in message for message in caplog.messages)


def test_foreign_parameters_are_an_incident_and_training_goes_on():
    old = net()
    optimizer = torch.optim.AdamW(old.parameters())
    model = copy.deepcopy(old)
    guard = guarded(model, optimizer)
    for batch in batches(3):
        guard.train_step(batch)
    guard.close()
    [incident] = guard.incidents
    assert (incident.step, incident.kind) == (0, "no-learning")
    assert incident.diagnosis.cause == "optimizer-foreign-parameters"
