"""Loops that call `guard.step`: refused steps are explained from their own lines, and nothing they hold is hurt by it."""

from __future__ import annotations

import math
import weakref
from contextlib import suppress

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nanproof
from nanproof.explain.replay import _recorder


class OwnLoss(nn.Linear):
    """Returns its loss."""

    def forward(self, x):
        return super().forward(x).square().mean()


@pytest.fixture
def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def sgd(model, rate=0.1):
    return torch.optim.SGD(model.parameters(), rate)


def cause(guard):
    (incident,) = guard.incidents
    return incident.diagnosis.cause


@pytest.mark.parametrize("call", ["guard.backward", "loss.backward"])
def test_the_models_own_loss_divided_by_a_number(call):
    """After `loss.backward()` the graph no longer has the number. A division by 0 is named with its line."""
    torch.manual_seed(0)
    model = OwnLoss(4, 1)
    optimizer = sgd(model)
    with nanproof.Guard(model, optimizer) as guard:
        for i in range(6):
            parts = 0 if i == 4 else 2
            loss = model(torch.randn(6, 4)) / parts
            optimizer.zero_grad()
            guard.backward(loss) if call == "guard.backward" else loss.backward()
            guard.step(loss)
    (incident,) = guard.incidents
    found = incident.diagnosis
    assert found.cause == "zero-denominator" and found.source.rpartition(":")[0].endswith("test_step_explained.py")


class Stubborn:
    """An output that raises when it is asked for what it does not have."""

    def __init__(self, y):
        self._held = {"y": y}

    def __getattr__(self, name):
        return self.__dict__["_held"][name]


def test_an_output_that_raises_when_it_is_looked_at():
    class Net(nn.Linear):
        def forward(self, x):
            return Stubborn(super().forward(x))

    torch.manual_seed(0)
    model = Net(4, 1)
    optimizer = sgd(model)
    with nanproof.Guard(model, optimizer) as guard:
        for i in range(5):
            x = torch.randn(6, 4)
            if i == 3:
                x[2, 0] = math.nan
            loss = model(x).y.square().mean()
            optimizer.zero_grad()
            loss.backward()
            guard.step(loss)
    assert cause(guard) == "nonfinite-batch"


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_guarded_model_can_be_traced():
    torch.manual_seed(0)
    model = OwnLoss(4, 1)
    with nanproof.Guard(model, sgd(model)):
        traced = torch.jit.trace(model, torch.randn(6, 4))
    x = torch.randn(6, 4)
    assert torch.equal(traced(x), model(x))


def test_a_forward_that_was_interrupted_is_not_taken_for_the_next():
    """As in a notebook, where the cell is run again. torch calls no hook after a KeyboardInterrupt."""

    class Net(OwnLoss):
        interrupted = False

        def forward(self, x):
            if self.interrupted:
                raise KeyboardInterrupt
            return super().forward(x)

    torch.manual_seed(0)
    model = Net(4, 1)
    optimizer = sgd(model)
    guard = nanproof.Guard(model, optimizer)

    def cell(steps, bad, interrupted):
        for i in range(steps):
            x = torch.randn(6, 4)
            if i == bad:
                x[2, 0] = math.nan
            model.interrupted = i == interrupted
            loss = model(x)
            optimizer.zero_grad()
            guard.backward(loss)
            guard.step(loss)

    with pytest.raises(KeyboardInterrupt):
        cell(4, bad=None, interrupted=3)
    cell(2, bad=0, interrupted=None)
    guard.close()
    (incident,) = guard.incidents
    assert (incident.diagnosis.cause, incident.diagnosis.samples) == ("nonfinite-batch", (2,))


def test_a_micro_batch_that_the_loop_gave_up_is_not_blamed(mlp):
    optimizer = sgd(mlp)
    with nanproof.Guard(mlp, optimizer) as guard:
        for i in range(7):
            optimizer.zero_grad()
            x = torch.randn(6, 4)
            if i == 4:
                x[2, 0] = math.nan
            out = mlp(x)
            loss = (out.square() * (0.0 if i == 5 else 1.0)).mean().log() if i == 5 else out.square().mean()
            guard.backward(loss)
            if i == 4:
                continue
            guard.step(loss)
    assert cause(guard) == "log-of-zero"


@pytest.mark.parametrize("parts", [2, 4])
@pytest.mark.parametrize("given", [True, False])
def test_accumulation_with_the_last_loss_or_none(mlp, parts, given):
    optimizer = sgd(mlp)
    with nanproof.Guard(mlp, optimizer) as guard:
        for i in range(6):
            optimizer.zero_grad()
            for part in range(parts):
                x, factor = torch.randn(6, 4), 0.0 if (i, part) == (4, parts - 1) else 1.0
                loss = mlp(x).square().mean() / parts + (mlp[0].bias.square() * factor + 1e-9 * factor).sqrt().sum()
                guard.backward(loss)
            guard.step(loss) if given else guard.step()
    assert cause(guard) == "sqrt-at-zero"


def test_backwards_that_the_guard_did_not_see_are_named(mlp):
    optimizer = sgd(mlp)
    with nanproof.Guard(mlp, optimizer) as guard:
        for i in range(6):
            optimizer.zero_grad()
            for part in range(2):
                x, y = torch.randn(6, 4), torch.randn(6, 1)
                if (i, part) == (4, 0):
                    y[2] = math.nan
                loss = F.mse_loss(mlp(x), y)
                loss.backward()
            guard.step(loss)
    (incident,) = guard.incidents
    assert "adds up several backward passes" in " ".join(incident.diagnosis.evidence)


def test_a_batch_that_was_written_before_anything_was_copied_is_not_blamed_on_the_write():
    class Net(nn.Linear):
        def forward(self, x):
            return super().forward(x.log_())

    torch.manual_seed(0)
    model = Net(4, 1)
    with nanproof.Guard(model, sgd(model)) as guard:
        x, y = torch.rand(6, 4) * 0.8 + 0.1, torch.randn(6, 1)
        y[2] = math.nan
        loss = F.mse_loss(model(x), y)
        loss.backward()
        guard.step(loss)
    (incident,) = guard.incidents
    assert incident.diagnosis.cause == "unknown"
    assert "writes into its batch" in " ".join(incident.diagnosis.evidence)
    assert torch.isfinite(x).all()  # a rerun would have taken the logarithm of negative numbers


class RunningLoss:
    """A loss that keeps something."""

    def __init__(self):
        self.calls, self.mean, self.all = 0, torch.zeros(()), []

    def __call__(self, out):
        loss = out.square().mean()
        self.calls += 1
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        self.all.append(loss.detach())
        return loss


def test_a_loss_object_is_left_as_the_loop_left_it(mlp):
    optimizer, criterion = sgd(mlp), RunningLoss()
    with nanproof.Guard(mlp, optimizer) as guard:
        for i in range(6):
            x = torch.randn(6, 4)
            if i == 5:
                x[2, 0] = math.nan
                before = criterion.mean.clone()
            optimizer.zero_grad()
            loss = criterion(mlp(x)) * 2
            guard.backward(loss)
            guard.step(loss)
    assert cause(guard) == "nonfinite-batch"
    assert criterion.calls == len(criterion.all) == 6
    assert math.isfinite(before) and math.isnan(criterion.mean)  # the loop's own call, not those of the diagnosis


def test_a_rate_that_is_raised_is_verified_as_in_train_step(mlp):
    """The steps before a divergence are kept."""
    optimizer = sgd(mlp, 0.01)
    with nanproof.Guard(mlp, optimizer, max_norm=None) as guard, suppress(nanproof.TrainingHalted):
        for i in range(260):
            optimizer.param_groups[0]["lr"] = 0.01 if i < 200 else 0.8
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(i))
            loss = F.mse_loss(mlp(x), x.sum(1, keepdim=True)) * 2
            optimizer.zero_grad()
            guard.backward(loss)
            guard.step(loss)
    first = guard.incidents[0].diagnosis
    assert (first.cause, first.verified) == ("learning-rate-too-high", True)


class Batch:
    """Data in an object of the loop's own class."""

    def __init__(self):
        self.x = torch.randn(1000, 4)


def test_batches_in_objects_count_to_what_may_be_kept(mlp, monkeypatch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp

        def forward(self, batch):
            return self.body(batch.x)

    model = Net()
    monkeypatch.setattr(_recorder, "LARGEST", 3 * 1000 * 4 * 4)
    optimizer, made = sgd(model), []
    with nanproof.Guard(model, optimizer) as guard:
        for _ in range(12):
            batch = Batch()
            made.append(weakref.ref(batch.x))
            loss = model(batch).square().mean() * 2
            optimizer.zero_grad()
            guard.backward(loss)
            guard.step(loss)
        assert 1 < sum(x() is not None for x in made) <= 4
