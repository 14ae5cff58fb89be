"""Replay: the same step again, bit for bit, and nothing left behind."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanproof
from nanproof.explain.replay._recorder import Recorder
from nanproof.explain.replay._replay import Deadline, OutOfTime, Replay
from toys import batches, differences, mse, net, poison, whole_state


def noisy(model, batch):
    """A loss that draws from every generator there is."""
    scale = 1 + 0.1 * random.random() + 0.1 * np.random.rand() + 0.1 * torch.rand(())  # noqa: NPY002
    return mse(model, batch) * scale


def test_a_replay_is_the_step_bit_for_bit():
    """Dropout, Python's, NumPy's and torch's random numbers, BatchNorm: loss and every gradient are those of the step."""
    model, batch = net(dropout=0.5), batches(1)[0]
    replay = Replay(model, noisy, [batch])  # takes the random numbers as they are now
    saved = {name: b.clone() for name, b in model.named_buffers()}
    loss = noisy(model, batch)
    loss.backward()
    then = {name: p.grad.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for name, b in model.named_buffers():
            b.copy_(saved[name])
    noisy(model, batch)  # every generator moves on
    for name, b in model.named_buffers():
        b.data.copy_(saved[name])
    again: dict[str, torch.Tensor] = {}
    outcome = replay.run(after=lambda: again.update({name: p.grad.clone() for name, p in model.named_parameters()}))
    assert outcome.loss == float(loss.detach())
    assert all(torch.equal(then[name], again[name]) for name in then)
    assert outcome.same_as(replay.run())


def test_the_guard_replays_the_step_it_refused():
    """The recorded loss of a refused step is the one its replay gives."""
    model, losses = net(dropout=0.5), []

    def loss_fn(model, batch):
        value = noisy(model, batch[:2])
        losses.append(float(value.detach()))
        return value + batch[2]

    guard = nanproof.Guard(model, torch.optim.SGD(model.parameters(), 1e-2), loss_fn=loss_fn)
    for i, batch in enumerate(batches(5)):
        guard.train_step([*batch, torch.tensor(float("inf") if i == 4 else 0.0)])
    guard.close()
    assert guard.incidents[0].step == 4 and guard.incidents[0].diagnosis is not None
    assert len(losses) > 5 and set(losses[4:]) == {losses[4]}


def test_a_replay_leaves_nothing_behind():
    """Weights, gradients, buffers, optimizer state and random numbers are as they were, even if the step raises."""
    model, data = net(), batches(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    mse(model, data[0]).backward()
    optimizer.step()
    before = whole_state(model, optimizer)
    gradients = [p.grad.clone() for p in model.parameters()]

    def breaks(model, batch):
        model[1].running_mean.fill_(7)
        mse(model, batch).backward()
        raise RuntimeError("no")

    for loss_fn in (mse, breaks):
        Replay(model, loss_fn, [data[1]]).run()
        assert list(differences("", before, whole_state(model, optimizer))) == []
        assert all(torch.equal(g, p.grad) for g, p in zip(gradients, model.parameters(), strict=True))


def test_time_runs_out():
    replay = Replay(net(), mse, batches(1), deadline=Deadline.after(-1))
    with pytest.raises(OutOfTime):
        replay.run()


def test_a_batch_that_was_written_since_is_noticed():
    """By torch's own count of writes: nothing is copied."""
    recorder, data = Recorder(), batches(1)[0]
    model = net()
    replay = Replay(model, mse, [data])
    recorder.keep(0, (data,), replay.random, replay.mode)
    assert not recorder.at(0).changed
    assert recorder.at(0).batches[0][0] is data[0]
    data[0][0, 0] = 5.0
    assert recorder.at(0).changed


def test_numpy_goes_on_as_if_the_bad_batch_had_not_been():
    """A refused step's NumPy numbers are drawn again by the next one; also the one that randn keeps in reserve."""

    def run(bad):
        np.random.seed(3)  # noqa: NPY002
        torch.manual_seed(0)
        model, drawn = net(dropout=0.0), []

        def loss_fn(model, batch):
            drawn.append(np.random.randn(3).tolist())  # noqa: NPY002
            return mse(model, batch)

        guard = nanproof.Guard(
            model, torch.optim.SGD(model.parameters(), 1e-2), loss_fn=loss_fn, policy=nanproof.Policy(diagnose="never")
        )
        for i, batch in enumerate(batches(6)):
            if i == 3 and bad:
                guard.train_step(poison(batch))
            guard.train_step(batch)
        guard.close()
        return drawn if not bad else drawn[:3] + drawn[4:]

    assert run(bad=True) == run(bad=False)


def test_compiled_models_are_replayed_eagerly_and_it_is_said():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    compiled = torch.compile(model, backend="eager")

    def loss_fn(model, batch):
        return F.mse_loss((model(batch) ** 2).sum(-1).sqrt(), torch.ones(len(batch)))

    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    diagnosis = nanproof.diagnose(compiled, loss_fn, torch.randn(3, 4))
    assert diagnosis.cause == "sqrt-at-zero"
    assert any("compiled" in sentence for sentence in diagnosis.evidence)


def test_a_replay_on_one_rank_ends_at_a_collective(tmp_path):
    """The other ranks are not coming: it says so instead of waiting for them."""
    import torch.distributed as dist

    from nanproof.explain._case import Case
    from nanproof.explain._diagnose import explain

    def counted(model, x):
        count = torch.tensor(float(len(x)))
        dist.all_reduce(count)
        return model(x).square().sum() / (count - len(x))

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        replay = Replay(nn.Linear(4, 1), counted, [torch.randn(3, 4)], alone=True)
        told = explain(Case("nonfinite-loss", replay=replay))
        assert told.cause == "unknown" and any("other ranks" in sentence for sentence in told.evidence)
        alone = Replay(nn.Linear(4, 1), counted, [torch.randn(3, 4)])
        assert explain(Case("nonfinite-loss", replay=alone)).cause == "zero-denominator"
    finally:
        dist.destroy_process_group()
