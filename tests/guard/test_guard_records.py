"""Records and lifecycle: what a guard writes, saves and restores, and what it leaves behind when it is closed or dropped."""

from __future__ import annotations

import copy
import gc
import json
import weakref

import pytest
import torch
from torch import nn

import nanproof
from guard.guarding import INF, guarded
from nanproof import read_incidents, read_steps
from toys import Run, batches, net, poison, whole_state


def test_every_step_is_recorded_and_read_back(tmp_path):
    guard = guarded(run_dir=tmp_path / "run", policy=nanproof.Policy(lag=2))
    data = batches(6)
    data[2], data[5] = poison(data[2]), poison(data[5], INF)
    for batch in data:
        guard.train_step(batch)
    guard.close()
    lines = (tmp_path / "run" / "steps.jsonl").read_text().splitlines()
    for text in lines:
        json.loads(text, parse_constant=lambda c: pytest.fail(f"{c} is not JSON"))
    read = list(read_steps(tmp_path / "run"))
    assert [r.step for r in read] == list(range(6))
    for a, b in zip(read, guard.history, strict=True):
        assert a.action == b.action
        assert a.names == b.names and a.norms.tolist() == pytest.approx(b.norms.tolist(), rel=1.5e-3, nan_ok=True)
    incidents = list(read_incidents(tmp_path / "run"))
    assert [i.step for i in incidents] == [2, 5]
    assert str(incidents[0]) == str(guard.incidents[0])


def test_a_run_that_was_killed_while_writing_can_be_resumed_into(tmp_path):
    for _ in range(2):
        guard = guarded(run_dir=tmp_path)
        for batch in batches(3):
            guard.train_step(batch)
        guard.close()
        path = tmp_path / "steps.jsonl"
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1])[:-20])
    assert [r.step for r in read_steps(path)] == [0, 1, 0, 1]


def test_the_history_is_bounded():
    guard = guarded(policy=nanproof.Policy(history=3))
    for batch in batches(5):
        guard.train_step(batch)
    assert [r.step for r in guard.history] == [2, 3, 4]


@pytest.mark.parametrize("lag", [0, 2])
def test_a_resumed_run_is_the_run_that_went_on(lag):
    data = batches(40)
    data[5], data[30] = poison(data[5]), poison(data[30])

    def run(stop):
        torch.manual_seed(0)
        model = net(dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        policy = nanproof.Policy(lag=lag, on_spike="skip")
        guard = guarded(model, optimizer, policy=policy, max_norm="auto")
        for i, batch in enumerate(data):
            if i == stop:
                saved = copy.deepcopy((guard.state_dict(), model.state_dict(), optimizer.state_dict()))
                guard.close()
                model = net(dropout=0.0)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                guard = guarded(model, optimizer, policy=policy, max_norm="auto")
                model.load_state_dict(saved[1])
                optimizer.load_state_dict(saved[2])
                guard.load_state_dict(saved[0])
            guard.train_step(batch)
        state = whole_state(model, optimizer, guard=guard)
        guard.close()
        assert guard.history[-1].step == 39
        return Run(guard, {k: v for k, v in state.items() if k != "random"})

    assert run(None).same_as(run(20)) == []


def test_the_context_manager_closes_and_lets_exceptions_through():
    with pytest.raises(KeyError), guarded() as guard:
        raise KeyError
    with pytest.raises(nanproof.UsageError, match="closed"):
        guard.train_step(batches(1)[0])


def test_hooks_are_gone_after_close():
    guard = guarded()
    p = guard.model[0].weight
    assert p._post_accumulate_grad_hooks
    guard.close()
    guard.close()
    assert not p._post_accumulate_grad_hooks
    assert not hasattr(guard.optimizer, "found_inf") and not hasattr(guard.optimizer, "grad_scale")


def test_a_guard_that_is_dropped_lets_go_of_everything():
    model = net()
    guard = guarded(model)
    guard.train_step(batches(1)[0])
    gone = weakref.ref(guard.parts.stepper), weakref.ref(model)
    del guard, model
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_copies_of_a_guarded_model_are_free_of_the_guard(tmp_path):
    model = net()
    guard = guarded(model)
    guard.train_step(batches(1)[0])
    twin = copy.deepcopy(model)
    torch.save(model, tmp_path / "model.pt")
    kept = model[1].running_mean.clone()
    model[1].running_mean.fill_(7.0)  # what the guard would take for good if a hook of the copy reached it
    twin.train()(torch.randn(8, 6))
    twin.load_state_dict(net().state_dict())
    buffers = guard.parts.stepper.buffers
    assert not buffers.in_step
    buffers.restore()
    assert torch.equal(model[1].running_mean, kept)
    assert isinstance(torch.load(tmp_path / "model.pt", weights_only=False), nn.Sequential)
