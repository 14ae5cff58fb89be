"""What a checkpoint does not hold."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

from probed import causes, probed


class Net(nn.Module):
    def __init__(self, keeps=""):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.norm, self.two = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 1)
        self.keeps, self.scale, self.seen, self.history = keeps, torch.ones(()), 0, []
        self.register_buffer("lost", torch.ones(()), persistent=False)
        self.register_buffer("saved", torch.ones(()))
        self.extra = [nn.Linear(16, 16)] if keeps == "list" else []
        self.loose = torch.randn(16, requires_grad=True) if keeps == "tensor" else None
        self.hidden = None

    def forward(self, x):
        x = self.norm(self.one(x)).relu()
        size = x.detach().abs().mean()
        if self.keeps == "attribute":
            self.scale = 0.9 * self.scale + 0.1 * size
            x = x / self.scale
        if self.keeps == "buffer":
            self.lost.mul_(0.9).add_(0.1 * size)
            x = x / self.lost
        if self.keeps == "saved":
            self.saved.mul_(0.9).add_(0.1 * size)
            x = x / self.saved
        if self.keeps == "counter":
            self.seen += 1
            x = x * min(1.0, self.seen / 10)
        if self.keeps == "log":
            self.seen += 1
            self.history.append(float(size))
        if self.keeps == "carried":
            x = x + (0 if self.hidden is None else 0.1 * self.hidden)
            self.hidden = x.detach()
        for layer in self.extra:
            x = layer(x)
        return self.two(x if self.loose is None else x * self.loose)


def batch():
    g = torch.Generator().manual_seed(0)
    return torch.randn(8, 6, generator=g), torch.randn(8, generator=g)


def loss_fn(model, batch):
    return F.mse_loss(model(batch[0]).squeeze(-1), batch[1])


def test_state_in_attributes_and_buffers():
    for keeps, where in (("attribute", "scale"), ("buffer", "lost"), ("counter", "seen")):
        (found,) = probed(Net(keeps), batch(), loss_fn).found
        assert (found.cause, found.where, found.verified) == ("state-not-saved", where, True)


def test_weights_that_are_not_registered():
    for keeps, where in (("list", "extra[0]"), ("tensor", "loose")):
        found = [d for d in probed(Net(keeps), batch(), loss_fn).found if d.cause == "state-not-saved"]
        assert [d.where for d in found] == [where]


class Forgetful(torch.optim.SGD):
    """Keeps its momentum in a list of its own."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.moments = {}

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                if p.grad is not None:
                    self.moments[i] = 0.9 * self.moments.get(i, torch.zeros_like(p)) + p.grad
                    p -= group["lr"] * self.moments[i]


def test_an_optimizer_that_forgets():
    model = Net()
    (found,) = probed(model, batch(), loss_fn, optimizer=Forgetful(model.parameters(), 0.1)).found
    assert found.cause == "state-not-saved" and found.where == "Forgetful" and found.phase == "optimizer"


def test_what_is_saved_or_does_not_matter():
    """Registered state, a log, a hidden state of each sample that a loop carries on, a frozen teacher in a list."""
    for keeps in ("", "saved", "log", "carried"):
        result = probed(Net(keeps), batch(), loss_fn)
        assert result.found == [], keeps
    model = Net()
    model.teacher = [copy.deepcopy(model).eval().requires_grad_(False)]
    plus = lambda m, b: loss_fn(m, b) + F.mse_loss(m(b[0]), m.teacher[0](b[0]))  # noqa: E731
    assert causes(model, batch(), plus) == []
    for optimizer in (torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), torch.optim.Adagrad(model.parameters(), 0.1)):
        result = probed(model, batch(), loss_fn, optimizer=optimizer)
        assert result.found == [] and "state-not-saved" in [p.name for p in result.probes]


def test_nothing_of_the_run_is_touched():
    model = Net("attribute")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    before = copy.deepcopy((model.state_dict(), model.scale, optimizer.state_dict()))
    probed(model, batch(), loss_fn, optimizer=optimizer)
    assert str(before) == str((model.state_dict(), model.scale, optimizer.state_dict()))
    assert all(p.grad is None for p in model.parameters())
