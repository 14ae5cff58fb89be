"""ProtectedRun: steps told by somebody else's loop, some of which can be run again and some of which cannot."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from nanproof import Guard, Policy, UsageError
from nanproof.integrations._protected import UNKNOWN, ProtectedRun

STEPS, BAD = 12, 3


def model_and_batches():
    torch.manual_seed(0)
    batches = torch.randn(STEPS, 4, 8)
    batches[BAD, 0, 0] = math.nan
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), batches


def loss_of(model, batch):
    return model(batch).square().mean()


def by_hand(order):
    """The plain loop, over the batches in this order."""
    model, batches = model_and_batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    for i in order:
        optimizer.zero_grad()
        loss_of(model, batches[i]).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize(
    ("unknown", "order"),
    [
        ((), [0, 1, 2, 4, 5, 6]),
        ((4,), [0, 1, 2, 4, 5, 6]),
        ((5,), [0, 1, 2, 5, 4, 6]),
        ((4, 5), [0, 1, 2, 4, 5, 6]),
        ((BAD,), [0, 1, 2, 4, 5, 6]),
    ],
)
def test_steps_that_cannot_be_run_again_behind_a_bad_one(unknown, order, scheduled):
    """Where verdicts come late, a step that can be run again waits behind a bad one, and one that cannot is taken at once: every
    good batch is trained on, once, and the schedule counts each. (It was an AssertionError that ended the run.)"""
    model, batches = model_and_batches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0) if scheduled else None
    guard = ProtectedRun(policy=Policy(lag=2))
    guard.start(model, optimizer, loss_fn=loss_of, max_norm=None, scheduler=schedule)
    for i, batch in enumerate(batches):
        optimizer.zero_grad()
        guard.engine.begin(UNKNOWN if i in unknown else batch)
        loss = loss_of(model, batch)
        guard.engine.loss(loss)
        loss.backward()
        guard.engine.step()
        guard.engine.end()
        if schedule is not None and i in unknown and i != BAD:
            schedule.step()  # which the guard leaves to the loop
    guard.close()
    assert [(incident.step, incident.action) for incident in guard.incidents] == [(BAD, "skipped")]
    assert sorted(record.step for record in guard.history) == list(range(STEPS))
    for mine, plain in zip(model.parameters(), by_hand([*order, *range(7, STEPS)]), strict=True):
        assert torch.equal(mine, plain)
    if schedule is not None:
        assert schedule.last_epoch == STEPS - 1


def test_a_guard_that_has_not_begun_says_so():
    """What `protect(trainer)` returns, before the trainer trains: there is nothing to wait for, and no state. (It was an
    AttributeError, or "this guard is closed; make a new one".)"""
    guard = ProtectedRun()
    guard.sync()
    guard.close()
    assert guard.path == "not started" and guard.history == [] and guard.next_step == 0
    for call in (guard.state_dict, lambda: guard.engine.begin(UNKNOWN), lambda: guard.load_state_dict({"version": 1})):
        with pytest.raises(UsageError, match="which has not begun"):
            call()


def test_what_a_borrowed_loop_cannot_do_is_not_there():
    """Its forward and backward are the trainer's, and so is resuming: no method is there only to raise."""
    for name in ("backward", "train_step", "resume", "wrap"):
        assert not hasattr(ProtectedRun, name) and hasattr(Guard, name)
    for name in ("incidents", "history", "forecasts", "path", "close", "sync", "state_dict", "load_state_dict", "counters"):
        assert hasattr(ProtectedRun(), name)
    assert not issubclass(ProtectedRun, Guard) and not issubclass(Guard, ProtectedRun)
