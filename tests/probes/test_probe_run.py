"""Probes never raise, stop in time, and leave everything as it was."""

from __future__ import annotations

import copy
import json
import time

import torch
import torch.nn.functional as F
from torch import nn

import nanproof
from nanproof.explain.replay._replay import Deadline, Replay
from nanproof.probes._contract import ProbeResult
from nanproof.probes._probing import Probing
from nanproof.probes._run import probe


def setting():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))
    return model, torch.optim.AdamW(model.parameters(), 1e-3), (torch.randn(8, 6), torch.randint(0, 3, (8,)))


def loss_fn(model, batch):
    model.train()  # as trainers do
    return F.cross_entropy(model(batch[0]), batch[1])


def test_a_probe_that_fails_is_silent_and_the_others_go_on():
    def fails(probing):
        yield ProbeResult("first", "did", "saw")
        raise ValueError

    def passes(probing):
        yield ProbeResult("second", "did", "saw")

    model, optimizer, batch = setting()
    results = probe(Probing(Replay(model, loss_fn, [batch]), optimizer), (fails, passes))
    assert [r.name for r in results] == ["first", "second"] and str(results[0]) == "first: did; saw"
    assert json.loads(json.dumps(results[0].to_json())) == {"name": "first", "did": "did", "saw": "saw", "found": None}


def test_time_is_kept():
    model, optimizer, batch = setting()

    def slow(model, batch):
        time.sleep(0.05)
        return loss_fn(model, batch)

    start = time.perf_counter()
    assert probe(Probing(Replay(model, slow, [batch], deadline=Deadline.after(0.3)), optimizer)) is not None
    assert time.perf_counter() - start < 2


def test_everything_is_restored_and_a_loss_that_sets_the_mode_is_fine():
    model, optimizer, batch = setting()
    loss_fn(model, batch).backward()
    optimizer.step()
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()], batch))
    random, names = torch.get_rng_state(), set(vars(model))
    assert nanproof.preflight(model, optimizer, batch, loss_fn) == []
    after = (model.state_dict(), optimizer.state_dict(), [p.grad for p in model.parameters()], batch)
    assert str(before) == str(after) and torch.equal(random, torch.get_rng_state()) and set(vars(model)) == names
