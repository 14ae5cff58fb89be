"""Of a bad step the good rest is trained on: exactly as if the bad part had never been there."""

from __future__ import annotations

import math
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

import nanproof
from nanproof.recover._salvage import without
from recover.runs import Rows, same, weights
from toys import OPTIMIZERS, batches, mse, net, poison


def guarded(optimizer="AdamW-default", dropout=0.2, lag=0, **policy):
    torch.manual_seed(0)
    model = net(dropout=dropout)
    opt = OPTIMIZERS[optimizer](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.99)
    return nanproof.Guard(model, opt, loss_fn=mse, scheduler=scheduler, policy=nanproof.Policy(salvage=True, lag=lag, **policy))


def rows(batch, keep):
    return [t[list(keep)] for t in batch]


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("optimizer", ["AdamW-fused", "SGD-fused", "Adam-single", "Lion"])
def test_a_batch_with_a_bad_sample_counts_as_one_without_it(optimizer, lag):
    """Weights, moments, running statistics, random numbers and schedule are those of a run whose batch never had the sample."""
    data = batches(16)
    salvaged = guarded(optimizer, lag=lag)
    for i, batch in enumerate(data):
        salvaged.train_step(poison(batch) if i in (5, 11) else batch)
    salvaged.sync()
    oracle = guarded(optimizer, lag=lag)
    for i, batch in enumerate(data):
        oracle.train_step(rows(batch, [0, 1, 3, 4, 5, 6, 7]) if i in (5, 11) else batch)
    oracle.sync()
    assert same(weights(salvaged), weights(oracle)) == []
    assert salvaged.scheduler.state_dict() == oracle.scheduler.state_dict()
    found = [(i.step, i.action, i.left_out, i.quarantined) for i in salvaged.incidents]
    assert found == [(5, "salvaged", (2,), ()), (11, "salvaged", (2,), ())]
    assert all(i.outcome == "took the step without sample 2 of the batch" for i in salvaged.incidents)


def test_of_several_bad_samples_all_go():
    data = batches(8)
    data[3] = poison(data[3])
    data[3][0][6, 0] = math.inf
    salvaged, oracle = guarded(), None
    for batch in data:
        salvaged.train_step(batch)
    oracle = guarded()
    for i, batch in enumerate(data):
        oracle.train_step(rows(batch, [0, 1, 3, 4, 5, 7]) if i == 3 else batch)
    assert same(weights(salvaged), weights(oracle)) == []
    assert [(i.action, i.left_out) for i in salvaged.incidents] == [("salvaged", (2, 6))]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_bad_sample_in_a_micro_batch_leaves_the_others_whole(bad):
    data = batches(24)

    def run(salvaging):
        guard = guarded()
        for i in range(8):
            micro = data[3 * i : 3 * i + 3]
            if i == 4:
                micro[bad] = poison(micro[bad]) if salvaging else rows(micro[bad], [0, 1, 3, 4, 5, 6, 7])
            guard.train_step(*micro)
        return guard

    salvaged = run(True)
    assert same(weights(salvaged), weights(run(False))) == []
    assert [(i.action, i.micro_batch, i.left_out) for i in salvaged.incidents] == [("salvaged", bad, (2,))]


def test_a_micro_batch_that_is_bad_as_a_whole_is_left_out():
    """A loss that is infinite whatever the sample: no row is to blame, the other micro-batches are trained on."""

    def loss_fn(model, batch):
        loss = mse(model, batch)
        return loss * math.inf if len(batch) > 2 else loss

    data = batches(24)

    def run(salvaging):
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        guard = nanproof.Guard(model, optimizer, loss_fn=loss_fn, policy=nanproof.Policy(salvage=True))
        for i in range(8):
            micro = data[3 * i : 3 * i + 3]
            if i == 4:
                micro = [micro[0], [*micro[1], True], micro[2]] if salvaging else [micro[0], micro[2]]
            guard.train_step(*micro)
        return guard

    salvaged = run(True)
    assert same(weights(salvaged), weights(run(False))) == []
    assert [(i.step, i.action, i.micro_batch, i.left_out) for i in salvaged.incidents] == [(4, "salvaged", 1, ())]
    assert salvaged.incidents[0].outcome == "took the step without micro-batch 1"


def test_a_batch_that_is_bad_as_a_whole_is_skipped():
    data = batches(8)
    data[4][0][:] = math.nan
    guard = guarded()
    for batch in data:
        guard.train_step(batch)
    oracle = guarded()
    for i, batch in enumerate(data):
        if i != 4:
            oracle.train_step(batch)
    assert same(weights(guard), weights(oracle)) == []
    assert [(i.step, i.action, i.left_out, i.outcome) for i in guard.incidents] == [(4, "skipped", (), "")]


def test_salvaged_steps_do_not_count_towards_the_cap():
    """Every batch has a bad sample; each is trained on without it, and nothing halts."""
    guard = guarded(max_consecutive_skips=2)
    for batch in batches(12):
        guard.train_step(poison(batch))
    assert [(i.action, i.left_out) for i in guard.incidents] == [("salvaged", (2,))] * 12
    assert [r.action for r in guard.history].count("skipped") == 12
    assert sum(r.action != "skipped" for r in guard.history) == 12


def test_a_sample_in_quarantine_is_not_seen_again(tmp_path):
    """This run refuses its batch once; the next epoch, and the next run, never see it."""
    data = Rows(48, bad=[17])

    def run():
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        guard = nanproof.Guard(model, optimizer, loss_fn=mse, run_dir=tmp_path)
        loader = guard.wrap(DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(1)))
        sizes = [len(batch[1]) for _ in range(3) for batch in loader if guard.train_step(batch) is not None]
        guard.close()
        return guard, sizes

    guard, sizes = run()
    assert [(i.action, i.quarantined, i.left_out) for i in guard.incidents] == [("skipped", (17,), ())]
    assert guard.incidents[0].outcome == "quarantined dataset index 17"
    assert sorted(sizes)[:2] == [7, 7] and sizes[:6] == [8] * 6
    [entry] = list(guard.parts.recovery.supply.quarantine)
    assert (entry.index, entry.size, entry.cause) == (17, 48, "nonfinite-batch") and entry.hash
    assert entry.bundle == guard.incidents[0].bundle
    guard, sizes = run()
    assert guard.incidents == [] and sizes.count(7) == 3


def test_a_bug_that_is_not_the_samples_fault_quarantines_nothing(tmp_path):
    """The loss is bad whatever the batch: without the rest being good, nobody is blamed."""

    def loss_fn(model, batch):
        return mse(model, batch) / 0.0

    torch.manual_seed(0)
    model = net()
    guard = nanproof.Guard(model, torch.optim.AdamW(model.parameters()), loss_fn=loss_fn, run_dir=tmp_path)
    with pytest.raises(nanproof.TrainingHalted):
        for batch in guard.wrap(DataLoader(Rows(), 4)):
            guard.train_step(batch)
    guard.close()
    assert len(guard.parts.recovery.supply.quarantine) == 0
    assert all(i.quarantined == () for i in guard.incidents) and guard.incidents[-1].action == "halted"
    assert sum(i.diagnosis is not None for i in guard.incidents) <= 3


@pytest.mark.parametrize("how", ["two loaders", "read ahead", "another order", "augmented"])
def test_nobody_is_blamed_where_the_batch_is_not_what_the_loader_gave(how, tmp_path):
    data = Rows(48, bad=[17])

    class Augmented(Rows):
        def __getitem__(self, i):
            return self.x[i] + 0.1 * torch.randn(6), self.y[i]

    torch.manual_seed(0)
    model = net()
    loss_fn = (lambda m, b: mse(m, b[0]) + mse(m, b[1])) if how == "two loaders" else mse
    guard = nanproof.Guard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss_fn=loss_fn, run_dir=tmp_path)
    source = DataLoader(Augmented(48, bad=[17]) if how == "augmented" else data, 8)
    loader = guard.wrap(source)
    if how == "two loaders":
        for both in zip(loader, guard.wrap(DataLoader(Rows(48, seed=9), 8)), strict=True):
            guard.train_step(both)
    elif how == "read ahead":
        batches_ = iter(loader)
        now = next(batches_)
        for later in batches_:
            guard.train_step(now)
            now = later
    else:
        for x, y in loader:
            guard.train_step([x.flip(0), y.flip(0)] if how == "another order" else [x, y])
    guard.close()
    assert [(i.action, i.quarantined) for i in guard.incidents] == [("skipped", ())]
    assert list(guard.parts.recovery.supply.quarantine) == []


Pair = namedtuple("Pair", "x y")


@dataclass
class Both:
    x: Tensor
    names: list[str]


@pytest.mark.parametrize("shape", ["list", "tuple", "named tuple", "dictionary", "dataclass", "nested", "tensor"])
def test_rows_are_taken_out_of_any_batch(shape):
    x, y, names = torch.arange(12.0).reshape(4, 3), torch.arange(4), ["a", "b", "c", "d"]
    batch = {
        "list": [x, y],
        "tuple": (x, y),
        "named tuple": Pair(x, y),
        "dictionary": {"x": x, "y": y, "names": names, "scale": torch.tensor(2.0), "tag": "t"},
        "dataclass": Both(x, names),
        "nested": {"inputs": {"x": x}, "more": (y, names)},
        "tensor": x,
    }[shape]
    left = without(batch, [1])
    keep = [0, 2, 3]
    assert type(left) is type(batch)
    if shape == "dictionary":
        assert torch.equal(left["x"], x[keep]) and torch.equal(left["y"], y[keep])
        assert left["names"] == ["a", "c", "d"] and left["scale"] == 2.0 and left["tag"] == "t"
        assert len(batch["names"]) == 4
    elif shape == "dataclass":
        assert torch.equal(left.x, x[keep]) and left.names == ["a", "c", "d"]
    elif shape == "nested":
        assert torch.equal(left["inputs"]["x"], x[keep]) and left["more"][1] == ["a", "c", "d"]
    elif shape == "tensor":
        assert torch.equal(left, x[keep])
    else:
        assert torch.equal(left[0], x[keep]) and torch.equal(left[1], y[keep])


def test_what_cannot_be_told_apart_is_left_whole():
    """Tensors that do not have one row a sample, or nothing left: no rest."""
    x = torch.ones(4, 3)
    assert without([x, torch.ones(7)], [1]) is None
    assert without([x], [0, 1, 2, 3]) is None
    assert without([x], []) is None
