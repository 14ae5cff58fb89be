"""Buffers: a refused step leaves no trace in them, whichever way the forward writes them."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import nanproof
from guard.guarding import INF, NAN, gradient_fault, guarded
from toys import Run, batches, finite, mse, net, poison


@pytest.mark.parametrize("lag", [0, 2])
def test_a_buffer_that_only_the_forward_broke_refuses_the_step(lag):
    """1e25 squares to Inf in BatchNorm's running variance; loss and gradients stay finite, evaluation would be NaN."""
    guard = guarded(policy=nanproof.Policy(lag=lag))
    data = batches(6)
    data[3] = poison(data[3], 1e25)
    for batch in data:
        guard.train_step(batch)
    guard.close()
    [incident] = guard.incidents
    assert (incident.step, incident.kind) == (3, "nonfinite-weight")
    assert "1.running_var" in incident.message
    assert finite(guard.model, guard.optimizer)


def test_a_buffer_that_is_infinite_on_purpose_is_no_fault():
    model = net()
    model.register_buffer("mask", torch.tensor([0.0, -INF]))
    guard = guarded(model)
    guard.train_step(batches(1)[0])
    guard.close()
    assert guard.history[0].action in ("stepped", "clipped")
    assert [i.kind for i in guard.incidents] == []


class LargestResult(TorchDispatchMode):
    """While open, notes how many elements the largest result of an operation has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (list, tuple)) else [result]
        self.elements = max([self.elements, *(t.numel() for t in made if isinstance(t, torch.Tensor))])
        return result


def test_large_buffers_that_no_forward_writes_are_not_copied():
    model = net()
    model.register_buffer("table", torch.zeros(1 << 19), persistent=False)
    guard = guarded(model)
    with LargestResult() as untouched:
        guard.train_step(batches(1)[0])
    assert 0 < untouched.elements < 1 << 19
    model.table.add_(1)
    with LargestResult() as written:
        guard.train_step(batches(1)[0])
    assert written.elements >= 1 << 19


def test_a_buffer_that_the_forward_rebinds_is_restored():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.layer = nn.Linear(6, 1)

        def forward(self, x):
            self.seen = self.seen + x.detach().sum()
            return self.layer(x)

    model = Counter()
    guard = guarded(model)
    data = batches(3)
    guard.train_step(data[0])
    before = model.seen.clone()
    guard.train_step(poison(data[1]))
    assert torch.equal(model.seen, before)


@pytest.mark.parametrize("how", ["in place", "through .data", "in another shape"])
def test_buffers_written_in_odd_ways_are_restored(how):
    """A codebook of 2 MiB; one written behind autograd's back, which bumps no version; a memory that starts as nothing."""

    class Memory(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("book", torch.zeros(1 << 19))
            self.register_buffer("memory", None)
            self.layer = nn.Linear(6, 1)

        def forward(self, x):
            if how == "in another shape":
                old = 0 if self.memory is None else len(self.memory)
                self.memory = x.detach().mean().repeat(old + 1)
            elif how == "in place":
                self.book += x.detach().mean()
            else:
                self.book.data.copy_(self.book + x.detach().mean())
            return self.layer(x)

    for at in (0, 2):
        states = []
        for saw_bad in (True, False):
            torch.manual_seed(0)
            model = Memory()
            guard = guarded(model)
            for i, batch in enumerate(batches(4)):
                if i != at or saw_bad:
                    guard.train_step(poison(batch) if i == at else batch)
            states.append({"book": model.book, "memory": model.memory, "weight": model.layer.weight})
        assert Run(guard, states[0]).same_as(Run(guard, states[1])) == []


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("persistent", [True, False])
def test_a_large_table_that_a_bad_batch_makes_anew_is_not_lost(persistent, lag):
    """A cache that grows with the longest input so far, first on the batch that is refused."""

    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("cache", torch.ones(1 << 19), persistent=persistent)
            self.layer = nn.Linear(6, 1)

        def forward(self, x):
            if x.isnan().any():
                self.cache = torch.zeros(1 << 20)
            return self.layer(x) * self.cache[0]

    model = Cached()
    guard = guarded(model, policy=nanproof.Policy(lag=lag))
    data = batches(6)
    data[2] = poison(data[2])
    for batch in data:
        guard.train_step(batch)
    guard.close()
    assert model.cache.shape == (1 << 19,) and [i.kind for i in guard.incidents] == ["nonfinite-loss"]


@pytest.mark.parametrize("fault", ["gradient", "exception"])
@pytest.mark.parametrize("lag", [0, 2])
def test_a_buffer_that_a_bad_batch_makes_first_is_not_kept(fault, lag):
    """Statistics that are taken from the first batch ever seen, which is bad; its forward runs again to look at it."""

    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mean", None)
            self.layer = nn.Linear(6, 1)

        def forward(self, x):
            if self.mean is None:
                self.mean = x.detach().mean(0)
            return self.layer(x - self.mean)

    def loss_fn(model, batch):
        loss = gradient_fault(NAN)(model, batch)
        if len(batch) > 2 and fault == "exception":
            raise RuntimeError("out of memory")
        return loss

    def run(disturbed):
        torch.manual_seed(0)
        model = Lazy()
        guard = guarded(model, loss_fn=loss_fn, policy=nanproof.Policy(lag=lag))
        for i, batch in enumerate(batches(5)):
            if i == 0 and disturbed and fault == "exception":
                with pytest.raises(RuntimeError, match="out of memory"):
                    guard.train_step([*batch, True])
            elif i or disturbed:
                guard.train_step([*batch, True] if i == 0 else batch)
        guard.close()
        return Run(guard, {"mean": model.mean, "weight": model.layer.weight})

    disturbed = run(True)
    assert disturbed.same_as(run(False)) == []
    assert [i.kind for i in disturbed.guard.incidents] == ["exception" if fault == "exception" else "nonfinite-gradient"]


def test_buffers_of_odd_kinds_are_left_alone():
    model = net()
    model.register_buffer("same", torch.ones(1).expand(8))
    model.register_buffer("tiny", torch.ones(4).to(torch.float8_e4m3fn))
    with torch.inference_mode():
        inferred = torch.zeros(1 << 20)
    model.register_buffer("inferred", inferred, persistent=False)
    guard = guarded(model)
    for batch in (batches(1)[0], poison(batches(1)[0]), batches(1)[0]):
        guard.train_step(batch)
    guard.close()
    assert [i.step for i in guard.incidents] == [1]


@pytest.mark.parametrize("whole", [True, False])
def test_what_other_code_does_to_buffers_between_steps_is_not_undone(whole):
    model = net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters())
    guard = guarded(model, optimizer)

    def step(batch):
        if whole:
            guard.train_step(batch)
        else:
            optimizer.zero_grad()
            loss = mse(model, batch)
            loss.backward()
            guard.step(loss)

    data = batches(3)
    step(data[0])
    model[1].running_mean.fill_(7.0)
    step(poison(data[1]))
    assert guard.history[-1].action == "skipped" and bool((model[1].running_mean == 7).all())


class Writes(nn.Module):
    """A forward that writes a buffer, and through a frozen layer."""

    def __init__(self):
        super().__init__()
        self.frozen, self.layer = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2)
        self.register_buffer("table", torch.arange(9.0).view(3, 3))
        self.turns = False

    def forward(self, x):
        self.table.mul_(1.0)
        if self.turns:
            self.table.t_()
        return self.layer(self.frozen(x))


def _steps(model, count, before):
    optimizer = torch.optim.AdamW(model.layer.parameters())
    with nanproof.Guard(model, optimizer, policy=nanproof.Policy(diagnose="never")) as guard:
        for step in range(count):
            factor = before(step)
            optimizer.zero_grad()
            loss = model(torch.ones(3, 4)).square().mean() * factor
            loss.backward()
            guard.step(loss)
    return guard


def test_a_refused_step_that_transposed_a_buffer_in_place():
    """Its address and shape are as before; only its strides are others."""
    model = Writes()

    def before(step):
        model.turns = step == 7
        return NAN if model.turns else 1.0

    guard = _steps(model, 9, before)
    assert [r.step for r in guard.history if r.action == "skipped"] == [7]
    assert torch.equal(model.table, torch.arange(9.0).view(3, 3))


def test_a_frozen_parameter_that_was_replaced_is_let_go():
    model, old = Writes(), []

    def before(step):
        if step == 4:
            old.append(weakref.ref(model.frozen.weight))
            model.frozen.weight = nn.Parameter(model.frozen.weight.detach().clone(), requires_grad=False)
        return 1.0

    def looking(step):
        assert step < 7 or old[0]() is None
        return before(step)

    _steps(model, 9, looking)
