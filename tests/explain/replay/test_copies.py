"""A step on copies is the optimizer's own step, for every optimizer, and leaves the run alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from nanproof.explain.replay._copies import all_finite, changed_share, step_on_copies
from toys import Lion, batches, differences, mse, net

CLASSES = [
    *(torch.optim.Adadelta, torch.optim.Adafactor, torch.optim.Adagrad, torch.optim.Adam, torch.optim.Adamax),
    *(torch.optim.AdamW, torch.optim.ASGD, torch.optim.NAdam, torch.optim.RAdam, torch.optim.RMSprop, torch.optim.Rprop),
    *(torch.optim.SGD, Lion),
]


class Averaging(torch.optim.SGD):
    """Keeps an average of its model outside of its state, and a list of its parameters."""

    def __init__(self, model, lr, must_be_given):
        super().__init__(model.parameters(), lr=lr)
        self.model, self.average, self.own = model, copy.deepcopy(model), list(model.parameters())

    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p, mean in zip(self.own, self.average.parameters(), strict=True):
            mean.lerp_(p, 0.1)


class Locked(torch.optim.SGD):
    """Holds something that cannot be copied."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr)
        self.generator = (x for x in range(3))


def stepped(make, schedule=False):
    """A model and its optimizer after three steps, and the gradients of the next one."""
    torch.manual_seed(0)
    model = net(dropout=0.0, batch_norm=False)
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 10) if schedule else None
    for batch in batches(3):
        optimizer.zero_grad()
        mse(model, batch).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    optimizer.zero_grad()
    mse(model, batches(4)[3]).backward()
    return model, optimizer, {p: p.grad.clone() for p in model.parameters()}


def everything(model, optimizer):
    own = {k: v for k, v in vars(optimizer).items() if isinstance(v, (int, float, str))}
    average = getattr(optimizer, "average", None)
    kept = [dict(optimizer.state.get(p, {})) for p in model.parameters()]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return copy.deepcopy([model.state_dict(), kept, groups, own, None if average is None else average.state_dict()])


@pytest.mark.parametrize("schedule", [False, True], ids=["plain", "schedule"])
@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_it_is_the_step(cls, schedule):
    """Bit for bit, moments included. A schedule has put its own method over the optimizer's step, and does not count this one."""
    model, optimizer, gradients = stepped(lambda model: cls(model.parameters(), lr=1e-2), schedule)
    before = everything(model, optimizer)
    found = step_on_copies(optimizer, gradients)
    assert list(differences("", everything(model, optimizer), before)) == []
    optimizer.step()
    assert found is not None and len(found) == 4 and all_finite(found)
    for each in found:
        assert torch.equal(each.after, each.parameter)
        live = optimizer.state.get(each.parameter, {})
        assert all(torch.equal(value, live[key]) for key, value in each.state.items())


def test_what_hangs_on_the_optimizer_is_copied_with_it():
    """A model that it averages into keeps its numbers; parameters in a list of its own are the copies."""
    model, optimizer, gradients = stepped(lambda model: Averaging(model, 0.1, "x"))
    before = everything(model, optimizer)
    found = step_on_copies(optimizer, gradients)
    assert list(differences("", everything(model, optimizer), before)) == []
    optimizer.step()
    assert found is not None and all(torch.equal(each.after, each.parameter) for each in found)


def test_what_cannot_be_copied_cannot_be_tried():
    _, optimizer, gradients = stepped(lambda model: Locked(model.parameters(), 0.1))
    assert step_on_copies(optimizer, gradients) is None


def test_without_gradients_there_is_nothing_to_try():
    model = nn.Linear(2, 1)
    assert step_on_copies(torch.optim.SGD(model.parameters(), 0.1), {}) is None
    assert changed_share(None) == 0.0 and not all_finite(None)


def test_settings_for_one_group():
    """The other group keeps its rate."""
    model, optimizer, gradients = stepped(
        lambda model: torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[4].parameters()}], lr=0.1)
    )
    found = step_on_copies(optimizer, gradients, by_group={id(optimizer.param_groups[0]): {"lr": 0.0}})
    still = {id(each.parameter) for each in found if torch.equal(each.before, each.after)}
    assert still == {id(p) for p in model[0].parameters()}


def test_another_dtype_takes_its_state_along():
    model, optimizer, gradients = stepped(lambda model: torch.optim.AdamW(model.parameters(), 1e-2))
    found = step_on_copies(optimizer, gradients, dtype=torch.float64)
    assert {each.after.dtype for each in found} == {torch.float64} == {each.state["exp_avg"].dtype for each in found}
    fresh = step_on_copies(optimizer, gradients, fresh=True)
    assert {float(each.state["step"]) for each in fresh} == {1.0} and {float(each.state["step"]) for each in found} == {4.0}
    assert next(iter(model.parameters())).dtype == torch.float32
