"""Lag and schedules: what may happen between a bad step and its verdict, and that a refused step advances no schedule."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import nanproof
from guard.guarding import guarded
from toys import Run, batches, mse, net, poison, whole_state


def lagging(disturb, *, bad=(4,), steps=10, scheduler=False, loss_fn=mse):
    """A run at lag 2, `disturb(i, guard, model, optimizer)` called before step i; and the same without the bad batches."""
    runs = []
    for saw_bad in (True, False):
        torch.manual_seed(0)
        model = net(dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        plan = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) if scheduler else None
        guard = guarded(model, optimizer, loss_fn=loss_fn, scheduler=plan, policy=nanproof.Policy(lag=2))
        for i, batch in enumerate(batches(steps)):
            disturb(i, guard, model, optimizer)
            if i in bad and not saw_bad:
                continue
            guard.train_step(poison(batch) if i in bad else batch)
        guard.sync()
        runs.append(Run(guard, whole_state(model, optimizer, plan)))
    return runs


@pytest.mark.parametrize("scheduler", [True, False])
@pytest.mark.parametrize("at", [4, 5, 6, 9])
def test_settings_that_the_loop_changes_survive_a_rewind(scheduler, at):
    def disturb(i, guard, model, optimizer):
        if i == at:
            optimizer.param_groups[0]["weight_decay"] = 0.5

    disturbed, oracle = lagging(disturb, scheduler=scheduler, bad=(4, 8))
    assert [i.step for i in disturbed.guard.incidents] == [4, 8]
    assert disturbed.same_as(oracle) == []
    assert disturbed.guard.optimizer.param_groups[0]["weight_decay"] == 0.5


def test_a_schedule_stepped_by_the_loop_is_not_undone_when_nothing_is_held():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    guard = guarded(model, optimizer, policy=nanproof.Policy(lag=2))
    guard.train_step(poison(batches(1)[0]))
    optimizer.param_groups[0]["lr"] = 1e-3
    guard.sync()
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_held_batches_run_again_in_the_mode_they_were_called_in():
    def disturb(i, guard, model, optimizer):
        if i == 6:
            model.eval()
            with torch.no_grad():
                guard.state_dict()
            model.train()

    disturbed, oracle = lagging(disturb)
    assert disturbed.same_as(oracle) == []


def test_parameters_added_behind_a_bad_step_do_not_jam_it():
    extra = nn.Parameter(torch.zeros(3))

    def disturb(i, guard, model, optimizer):
        if i == 5:
            optimizer.add_param_group({"params": [extra]})

    disturbed, oracle = lagging(disturb)
    assert [r.step for r in disturbed.guard.history] == list(range(10))
    assert disturbed.same_as(oracle) == []


def test_loss_functions_that_pop_from_their_batch_find_it_whole_again():
    def popping(model, batch):
        return mse(model, [batch.pop(0), batch.pop(0)])

    disturbed, oracle = lagging(lambda *_: None, loss_fn=popping)
    assert [r.step for r in disturbed.guard.history] == list(range(10))
    assert disturbed.same_as(oracle) == []


def test_loading_a_checkpoint_forgets_what_was_under_way():
    model = net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    calls = []

    def loss_fn(model, batch):
        calls.append(batch)
        return mse(model, batch)

    guard = guarded(model, optimizer, loss_fn=loss_fn, policy=nanproof.Policy(lag=2))
    data = batches(8)
    for batch in data[:4]:
        guard.train_step(batch)
    saved = copy.deepcopy((guard.state_dict(), model.state_dict(), optimizer.state_dict()))
    guard.train_step(poison(data[4]))
    guard.train_step(data[5])
    model.load_state_dict(saved[1])
    optimizer.load_state_dict(saved[2])
    guard.load_state_dict(saved[0])
    under_way = guard.parts.engine.under_way
    assert not under_way.pending and not under_way.held
    assert all(torch.equal(v, saved[1][k]) for k, v in model.state_dict().items())
    calls.clear()
    guard.train_step(data[4])
    guard.sync()
    assert len(calls) == 1  # a step that the latch had held would have been run again
    assert guard.history[-1].step == 4 and guard.history[-1].action != "skipped" and guard.incidents == []


def test_the_schedule_does_not_advance_on_a_refused_step():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1 / (n + 1))
    guard = guarded(model, optimizer, scheduler=scheduler)
    data = batches(4)
    for batch in (data[0], poison(data[1]), poison(data[2]), data[3]):
        guard.train_step(batch)
    assert [r.lr[0] for r in guard.history] == [1.0, 0.5, 0.5, 0.5]
