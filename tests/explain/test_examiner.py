"""The examiner beside a run: what it must never do to it."""

from __future__ import annotations

import gc
import logging
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import nanproof
from nanproof.explain.replay._recorder import KEPT
from toys import batches, mse, net, poison


def guarded(model, loss_fn=mse, **kwargs):
    return nanproof.Guard(model, torch.optim.SGD(model.parameters(), 1e-2), loss_fn=loss_fn, **kwargs)


def test_a_failure_while_looking_is_a_warning(monkeypatch, caplog):
    """The run goes on, and nothing more is looked for."""
    model = net()
    guard = guarded(model)
    monkeypatch.setattr("nanproof.explain._silent.SilentWatch.see", lambda *_: 1 / 0)
    with caplog.at_level(logging.WARNING, "nanproof"):
        for batch in batches(4):
            guard.train_step(batch)
    guard.close()
    assert caplog.text.count("not looked for any more") == 1


@pytest.mark.parametrize("when", ["new", "never"])
def test_batches_are_let_go(when):
    """Eight are kept, none with "never", none after close."""
    model = net()
    guard = guarded(model, policy=nanproof.Policy(diagnose=when))
    alive = []
    for batch in batches(20):
        fresh = [x.clone() for x in batch]
        alive.append(weakref.ref(fresh[0]))
        guard.train_step(fresh)
        del fresh
    gc.collect()
    assert sum(ref() is not None for ref in alive) <= (KEPT if when == "new" else 1)
    guard.close()
    gc.collect()
    assert sum(ref() is not None for ref in alive) == 0


class Momentum(nn.Module):
    """The forward writes parameters, a buffer and attributes, as MoCo, an EMA and an RNN's memory do."""

    def __init__(self):
        super().__init__()
        self.online, self.slow = nn.Linear(6, 1), nn.Linear(6, 1).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(()))
        self.memory, self.calls, self.seen = torch.zeros(1), 0, []

    def forward(self, x):
        with torch.no_grad():
            for a, b in zip(self.slow.parameters(), self.online.parameters(), strict=True):
                a.lerp_(b, 0.1)
            self.mean.mul_(0.9).add_(x.mean(), alpha=0.1)
        self.calls += 1
        self.seen.append(self.calls)
        self.memory = self.memory * 0.5 + float(self.calls)
        return self.online(x) + self.slow(x) + 1e-3 * self.memory + self.mean


def test_a_forward_that_keeps_state_is_not_disturbed():
    """Parameters, buffers and attributes that the forward writes are the same with and without a diagnosis."""
    states = []
    for when in ("always", "never"):
        torch.manual_seed(0)
        model = Momentum()
        guard = guarded(model, policy=nanproof.Policy(diagnose=when))
        for i, batch in enumerate(batches(9)):
            guard.train_step(poison(batch) if i == 5 else batch)
        guard.close()
        states.append((str(model.state_dict()), float(model.memory), model.calls, model.seen))
    assert states[0] == states[1]


def test_torch_is_left_as_it_was():
    """Global hooks, functional's checks, checkpointing: nothing of a diagnosis stays."""
    import torch.nn.modules.module as module
    import torch.utils.checkpoint as checkpointing

    def facts():
        return (
            len(module._global_forward_hooks),
            len(module._global_forward_hooks_with_kwargs),
            len(module._global_forward_pre_hooks),
            F.has_torch_function_unary,
            torch.autograd.has_torch_function,
            "apply" in vars(checkpointing.CheckpointFunction),
            torch.distributions.Distribution.__init__,
            torch.is_grad_enabled(),
        )

    before = facts()
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))
    guard = guarded(model, loss_fn=lambda m, b: m[1](m[0](b[0]).detach()).mean(), policy=nanproof.Policy(diagnose="always"))
    for i, batch in enumerate(batches(5)):
        guard.train_step(poison(batch) if i == 4 else batch)
    guard.close()
    assert len(guard.incidents) == 2 and facts() == before


def test_a_rehearsal_leaves_the_optimizer_alone():
    """Hooks on its step are not called, a counter of its own stays, a tensor learning rate is the same object."""
    torch.manual_seed(0)
    model = nn.Linear(6, 1)
    rate = torch.tensor(0.9)
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    guard = nanproof.Guard(model, optimizer, loss_fn=lambda m, b: mse(m, b) * 30, max_norm=None)
    for batch in batches(20):
        guard.train_step(batch)
        if guard.incidents:
            break
    guard.close()
    assert guard.incidents[0].kind == "divergence"
    assert len(calls) <= len(guard.history) and optimizer.param_groups[0]["lr"] is rate and float(rate) == pytest.approx(0.9)
