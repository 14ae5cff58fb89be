"""Rehearsed steps leave nothing behind, whatever is changed about them and wherever they stop."""

from __future__ import annotations

import copy
import random
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from nanproof.core.support._context import Mode, RandomState
from nanproof.explain.replay._recorder import Moment
from nanproof.explain.replay._rehearse import initialise, rehearse, undone
from nanproof.explain.replay._replay import Deadline, OutOfTime, Replay
from nanproof.explain.replay._surroundings import weights_as
from toys import Lion, batches, differences, mse, net


class Noisy(torch.optim.SGD):
    """Draws random numbers in its step, as stochastic rounding does."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(1e-3 * torch.randn_like(p))
        random.random()
        return super().step(closure)


class Breaking(torch.optim.AdamW):
    """Raises in the middle of its step, once its state and some weights are written."""

    def step(self, closure=None):
        super().step(closure)
        if self.breaks:
            self.param_groups[0]["lr"] = 123.0
            raise RuntimeError("this optimizer needs a closure")


OPTIMIZERS = {
    "adamw": lambda ps: torch.optim.AdamW(ps, 1e-2, amsgrad=True),
    "fused": lambda ps: torch.optim.Adam(ps, 1e-2, fused=True),
    "momentum": lambda ps: torch.optim.SGD(ps, 1e-2, momentum=0.9),
    "tensor rate": lambda ps: torch.optim.AdamW(ps, torch.tensor(1e-2), capturable=False, foreach=False),
    "two groups": lambda ps: torch.optim.RMSprop([{"params": [p], "lr": 10.0**-i} for i, p in enumerate(ps, 2)]),
    "lion": lambda ps: Lion(ps, 1e-3),
    "noisy": lambda ps: Noisy(ps, 1e-2, momentum=0.9),
}
OPTIONS = {
    "as it is": {},
    "factor": {"factor": 0.1},
    "rates": {"rates": [0.5]},
    "fresh": {"fresh": True},
    "from start": {"from_start": True},
    "change": {"change": lambda t: t * 2},
    "loss factor": {"loss_factor": 0.25, "max_norm": 0.1},
    "rounds": {"rounds": 3},
    "all": {"from_start": True, "factor": 0.1, "change": lambda t: t + 1, "loss_factor": 2.0, "max_norm": 1.0, "rounds": 2},
}


class Run:
    """A run some steps under way: gradients in place, state in the optimizer, a frozen layer, hooks, running statistics."""

    def __init__(self, make, loss_fn=mse):
        torch.manual_seed(3)
        self.model = net(dropout=0.5)
        self.model[0].bias.requires_grad_(False)
        self.optimizer = make([p for p in self.model.parameters() if p.requires_grad])
        self.calls: list[str] = []
        self.optimizer.register_step_pre_hook(lambda *_: self.calls.append("pre"))
        self.optimizer.register_step_post_hook(lambda *_: self.calls.append("post"))
        for batch in batches(3):
            self.optimizer.zero_grad()
            mse(self.model, batch).backward()
            self.optimizer.step()
        mode = Mode.now(list(self.model.modules()), torch.device("cpu"))
        self.moments = [Moment(i, (b,), (), RandomState.now(()), mode) for i, b in enumerate(batches(2, seed=5))]
        self.replay = Replay(self.model, loss_fn, self.moments[-1].batches)
        self.calls.clear()
        self.random = random.getstate(), torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
        self.gradients = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in self.model.parameters()]
        self.hooks = self._hooks()
        self.was = self._all()

    def _all(self):
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "frozen": [p.requires_grad for p in self.model.parameters()],
            "training": [m.training for m in self.model.modules()],
            "batches": [m.batches for m in self.moments],
        }
        return copy.deepcopy(state)

    def _hooks(self):
        found = [self.optimizer._optimizer_step_pre_hooks, self.optimizer._optimizer_step_post_hooks]
        for module in self.model.modules():
            found += [module._forward_hooks, module._forward_pre_hooks, module._backward_hooks]
        return [(hooks, dict(hooks)) for hooks in found]

    def changed(self):
        """What is not as it was, in names."""
        found = list(differences("", self.was, self._all()))
        now = random.getstate(), torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
        same = now[0] == self.random[0], torch.equal(now[1], self.random[1]), now[2][2] == self.random[2][2]
        found += [name for name, ok in zip(("python", "torch", "numpy"), same, strict=True) if not ok]
        for p, gradient, value in self.gradients:
            if p.grad is not gradient or (gradient is not None and not torch.equal(gradient, value)):
                found.append("gradient")
        found += ["hooks" for (a, x), (b, y) in zip(self.hooks, self._hooks(), strict=True) if a is not b or x != y]
        return found + self.calls


@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_everything_is_as_it_was_after_a_rehearsal(make, how):
    run = Run(OPTIMIZERS[make])
    losses = rehearse(run.replay, run.optimizer, run.moments, **OPTIONS[how])
    assert losses is not None and len(losses) == 2 * OPTIONS[how].get("rounds", 1) + 1
    assert run.changed() == []


def test_a_context_around_each_step_is_closed_again():
    run, opened = Run(OPTIMIZERS["adamw"]), []

    @contextmanager
    def counted():
        opened.append(1)
        with weights_as({run.model[1].running_mean: torch.ones(16)}):
            yield
        opened.pop()

    assert rehearse(run.replay, run.optimizer, run.moments, under=counted) is not None
    assert (opened, run.changed()) == ([], [])


@pytest.mark.parametrize("how", OPTIONS)
def test_an_optimizer_that_raises_leaves_everything_as_it_was(how):
    def make(parameters):
        optimizer = Breaking(parameters, 1e-2)
        optimizer.breaks = False
        return optimizer

    run = Run(make)
    run.optimizer.breaks = True
    assert rehearse(run.replay, run.optimizer, run.moments, **OPTIONS[how]) is None
    assert run.changed() == []


def test_a_model_that_raises_leaves_everything_as_it_was():
    def raising(model, batch):
        loss = mse(model, batch)
        calls.append(1)
        if len(calls) > 1:
            raise ValueError("a bad batch")
        return loss

    calls: list[int] = []
    run = Run(OPTIMIZERS["adamw"], raising)
    losses = rehearse(run.replay, run.optimizer, run.moments, from_start=True)
    assert losses is not None and len(losses) == 2 and losses[1] != losses[1]
    assert run.changed() == []


def test_a_rehearsal_that_runs_out_of_time_leaves_everything_as_it_was():
    run = Run(OPTIMIZERS["adamw"])

    def late(t):
        run.replay.deadline = Deadline.after(-1)
        return t

    with pytest.raises(OutOfTime):
        rehearse(run.replay, run.optimizer, run.moments, from_start=True, change=late, rounds=5)
    assert run.changed() == []


def test_whatever_is_written_inside_is_undone():
    run = Run(OPTIMIZERS["momentum"])
    with pytest.raises(KeyError), undone(run.model, run.optimizer):
        initialise(run.model)
        run.optimizer.state.clear()
        run.optimizer.param_groups[0]["lr"] = 7.0
        for p in run.model.parameters():
            p.grad = torch.ones_like(p)
        torch.randn(5)
        raise KeyError
    assert run.changed() == []


def test_fresh_weights_are_the_same_every_time_and_frozen_ones_stay():
    run = Run(OPTIMIZERS["adamw"])
    found = []
    for _ in range(2):
        with undone(run.model, run.optimizer):
            initialise(run.model)
            found.append(copy.deepcopy(run.model.state_dict()))
        torch.randn(3)
    assert list(differences("", *found)) == []
    assert torch.equal(found[0]["0.bias"], run.was["model"]["0.bias"])
    assert not torch.equal(found[0]["0.weight"], run.was["model"]["0.weight"])
    assert torch.equal(found[0]["1.running_mean"], torch.zeros(16))


def test_weights_of_other_modules_are_not_initialised():
    """A module of one's own may reset itself to anything."""

    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.full((3,), 5.0))

        def reset_parameters(self):
            raise AssertionError

    model = nn.Sequential(Own(), nn.Linear(3, 1))
    initialise(model)
    assert model[0].scale.tolist() == [5.0] * 3


def test_losses_are_those_of_the_same_steps_taken_for_real():
    """Compared with a copy of the run that takes them."""
    run = Run(OPTIMIZERS["momentum"])
    rehearsed = rehearse(run.replay, run.optimizer, run.moments, loss_factor=0.5, max_norm=0.7, change=lambda t: t * 2)
    losses = []
    for moment in (*run.moments, run.moments[-1]):
        moment.random.restore()
        run.optimizer.zero_grad()
        loss = mse(run.model, [t * 2 for t in moment.batches[0]])
        losses.append(float(loss.detach()))
        (loss * 0.5).backward()
        nn.utils.clip_grad_norm_([p for p in run.model.parameters() if p.grad is not None], 0.7)
        run.optimizer.step()
    assert rehearsed == pytest.approx(losses, rel=1e-5)
