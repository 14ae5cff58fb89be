"""Gradient checkpointing: a part that is computed again inside backward changes nothing in what a diagnosis says."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import nanproof
from nanproof.explain.locate._locate import locate, survey
from nanproof.explain.replay._interventions import SafeDivision
from nanproof.explain.replay._replay import Replay

BAD = 3
FLAVOURS = [pytest.param(False, id="non-reentrant"), pytest.param(True, id="reentrant")]


def divide(x, y, kept):
    """0 is divided by: Inf in the forward."""
    return y / kept


def logarithm(x, y, kept):
    """-inf in the forward, and more saved tensors once its input is made safe."""
    return x + torch.log(y * 0 + kept)


def root(x, y, kept):
    """Fine in the forward, Inf in backward."""
    return x + torch.sqrt((y * kept).square())


def masked(x, y, kept):
    """NaN in the forward, masked; it comes back in backward. The `where` keeps nothing that has to be computed again."""
    return x + torch.where(kept == 0, 0.0, kept / kept * y)


FAULTS = {divide: "zero-denominator", logarithm: "log-of-zero", root: "sqrt-at-zero", masked: "masked-branch-gradient"}


class Part(nn.Module):
    def __init__(self, fault) -> None:
        super().__init__()
        self.fault, self.linear, self.drop = fault, nn.Linear(4, 4), nn.Dropout(0.2)

    def forward(self, x, kept):
        return self.fault(x, self.linear(self.drop(x)), kept)


class Layer(nn.Module):
    """Checkpoints a module, or a function of its own; `reentrant=None` neither."""

    def __init__(self, fault, what, reentrant) -> None:
        super().__init__()
        self.part, self.what, self.reentrant = Part(fault), what, reentrant

    def forward(self, x, kept):
        part = self.part if self.what == "module" else self.twice
        return part(x, kept) if self.reentrant is None else checkpoint(part, x, kept, use_reentrant=self.reentrant)

    def twice(self, x, kept):
        return self.part.fault(x, self.part.linear(self.part.linear(x)), kept)


class Model(nn.Module):
    def __init__(self, fault, what="module", reentrant=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(4, 4), nn.Linear(4, 1)
        self.layers = nn.ModuleList([Layer(fault, what, reentrant) for _ in range(3)])

    def forward(self, x, kept):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x, kept)
        return self.head(x)


def bad_batch():
    x, kept = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.ones(6, 1)
    kept[BAD] = 0
    return x, kept


def loss_fn(model, batch):
    return model(*batch).abs().mean()


@pytest.mark.parametrize("reentrant", FLAVOURS)
@pytest.mark.parametrize("what", ["module", "function"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_the_diagnosis_is_that_of_the_model_without_checkpointing(fault, what, reentrant):
    """To the word: cause, place, sample, and loss and gradient norm of the fix that was tried."""
    plain, checkpointed = (nanproof.diagnose(Model(fault, what, how), loss_fn, bad_batch()) for how in (None, reentrant))
    assert checkpointed == plain
    assert (plain.cause, plain.verified, plain.samples) == (FAULTS[fault], True, (BAD,))


@pytest.mark.parametrize("reentrant", FLAVOURS)
@pytest.mark.parametrize("what", ["module", "function"])
@pytest.mark.parametrize("fault", [root, masked], ids=lambda fault: fault.__name__)
def test_the_operation_of_the_forward_is_named(fault, what, reentrant):
    """Not the one that repeats it inside backward: that has no place in the model where a function was checkpointed."""
    replay = Replay(Model(fault, what, reentrant), loss_fn, [bad_batch()])
    birth = locate(replay, *survey(replay))
    loss = next(op.number for op in birth.trace.ops if op.name == "abs")  # the forward ends there
    named, path = birth.op.number, birth.op.path
    assert named < loss and path == ("layers.2.part" if what == "module" else "layers.2")


@pytest.mark.parametrize("reentrant", FLAVOURS)
def test_each_round_of_a_loop_is_found_again(reentrant):
    """The same line runs several times in one checkpointed part: the one that is named had the numbers that were bad."""

    def loop(x, y, kept):
        for i in range(4):
            x = x + torch.sqrt((y * (kept if i == 1 else 1.0)).square())
        return x

    replay = Replay(Model(loop, "function", reentrant), loss_fn, [bad_batch()])
    birth = locate(replay, *survey(replay))
    named = birth.op.name, birth.op.path, birth.samples, birth.op.outputs[0].range.low
    assert named == ("sqrt", "layers.2", (BAD,), 0.0)


@pytest.mark.parametrize("reentrant", FLAVOURS)
def test_a_change_acts_as_often_again_as_in_the_forward(reentrant):
    """The gradients under a change are those of the model that was written with it."""

    def safe(x, y, kept):
        return y / torch.where(kept == 0, 1.0, kept)

    change = SafeDivision()
    changed, written = Replay(Model(divide, "module", reentrant), loss_fn, [bad_batch()]), Model(safe)
    outcome = changed.run(change)
    assert change.acted == 6 and outcome.finite  # three layers, twice each
    assert outcome.same_as(Replay(written, loss_fn, [bad_batch()]).run())


def test_a_gradient_inside_the_loss_is_under_the_change_too():
    """torch.autograd.grad computes a checkpointed part again like backward does."""

    def penalty(model, batch):
        x, kept = batch[0].clone().requires_grad_(), batch[1]
        [slope] = torch.autograd.grad(model(x, kept).square().sum(), x, create_graph=True)
        return slope.square().mean()

    plain, checkpointed = (
        Replay(Model(divide, "module", how), penalty, [bad_batch()]).run(SafeDivision()) for how in (None, False)
    )
    assert plain.finite and checkpointed.same_as(plain)


class BadBackward(torch.autograd.Function):
    """A backward written by hand that divides by 0."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.save_for_backward(kept)
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        return gradient / ctx.saved_tensors[0], None


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "non-reentrant", "reentrant"])
def test_a_backward_written_by_hand_is_not_disguised(reentrant):
    """A change of the forward says nothing about it, so the change must not make it finite."""
    replay = Replay(Model(lambda x, y, kept: BadBackward.apply(y, kept), "module", reentrant), loss_fn, [bad_batch()])
    change = SafeDivision()
    outcome = replay.run(change)
    assert change.acted == 0 and not outcome.gradients_finite


@pytest.mark.parametrize("reentrant", FLAVOURS)
def test_a_run_goes_on_under_a_remedy(reentrant):
    """Healed, it trains to the same weights as without checkpointing."""
    ends = []
    for how in (None, reentrant):
        model = Model(divide, "module", how)
        model.eval()
        guard = nanproof.Guard(
            model, torch.optim.SGD(model.parameters(), lr=1e-2), loss_fn=loss_fn, policy=nanproof.Policy(heal=True)
        )
        x, kept = bad_batch()
        for step in range(6):
            guard.train_step((x, kept if step == 2 else torch.ones_like(kept)))
        guard.close()
        ends.append((copy.deepcopy(model.state_dict()), [(i.step, i.action, i.remedy) for i in guard.incidents]))
    (plain, told), (checkpointed, told_too) = ends
    assert told == told_too == [(2, "healed", "a divisor of 0 is taken as 1")]
    assert all(torch.equal(plain[name], checkpointed[name]) for name in plain)
