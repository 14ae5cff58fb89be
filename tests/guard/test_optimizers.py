"""Unusual parameters and optimizers: which path the guard takes, and that refusing a step works on all of them."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

import nanproof
from guard.guarding import NAN, guarded
from toys import OPTIMIZERS, Lion, Run, batches, finite, mse, net, poison, whole_state


def test_sparse_gradients_take_the_host_path():
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(10, 6, sparse=True, mode="sum"), nn.Linear(6, 1))
    sparse = torch.optim.SparseAdam(list(model[0].parameters()), lr=1e-2)
    guard = nanproof.Guard(model, sparse, loss_fn=lambda m, b: m(b).square().mean() * (NAN if b[0, 0] == 9 else 1), max_norm=0.01)
    assert guard.path.startswith("host: SparseAdam")
    dense = copy.deepcopy(model)
    batch = torch.tensor([[1, 2], [2, 3]])
    guard.train_step(batch)
    dense[0].sparse = False
    dense(batch).square().mean().backward()
    assert guard.history[0].grad_norm == pytest.approx(dense[0].weight.grad.norm().item(), rel=1e-5)
    before = model[0].weight.detach().clone()
    guard.train_step(torch.tensor([[9, 2], [2, 3]]))
    assert torch.equal(before, model[0].weight) and [i.step for i in guard.incidents] == [1]
    model = nn.Sequential(nn.Embedding(10, 6, sparse=True))
    assert nanproof.Guard(model, torch.optim.SGD(model.parameters(), 0.1)).path.startswith(
        "host: the fused kernels take no sparse"
    )


def test_mixed_dtypes_groups_frozen_tied_and_unused_parameters():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(6, 6)
            self.tied = nn.Linear(6, 6)
            self.tied.weight = self.first.weight
            self.frozen = nn.Linear(6, 6).requires_grad_(False)
            self.unused = nn.Linear(6, 6)
            self.wide = nn.Linear(6, 1).double()

        def forward(self, x):
            return self.wide(self.frozen(self.tied(self.first(x))).double())

    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(
        [
            {"params": [model.first.weight, model.first.bias, model.tied.bias]},
            {"params": [*model.unused.parameters()], "lr": 0.5},
            {"params": [*model.wide.parameters()], "weight_decay": 0},
        ]
    )
    guard = guarded(model, optimizer)
    frozen = model.frozen.weight.detach().clone()
    data = batches(5)
    data[2] = poison(data[2])
    for batch in data:
        guard.train_step(batch)
    assert [i.step for i in guard.incidents] == [2]
    record = guard.history[0]
    assert record.names == (
        "first.weight",
        "first.bias",
        "tied.bias",
        "unused.weight",
        "unused.bias",
        "wide.weight",
        "wide.bias",
    )
    assert set(record.by_parameter) == {"first.weight", "first.bias", "tied.bias", "wide.weight", "wide.bias"}
    assert len(record.lr) == 3
    assert torch.equal(frozen, model.frozen.weight)
    assert finite(model, optimizer)


def test_gradients_laid_out_unlike_their_parameters_are_not_mixed_up():
    """The fused CPU kernel reads parameter and gradient with one index: a transposed gradient must be laid out first."""
    p = nn.Parameter(torch.zeros(4, 3))
    model = nn.Module()
    model.p = p
    gradient = torch.arange(12.0).view(3, 4).t()
    guard = guarded(model, torch.optim.SGD([p], lr=1.0, fused=True), max_norm=None)
    p.grad = gradient
    guard.step(torch.tensor(1.0))
    assert torch.equal(p.detach(), -gradient)


def test_complex_parameters_take_the_host_path():
    p = nn.Parameter(torch.randn(4, dtype=torch.complex64))
    model = nn.Module()
    model.p = p
    guard = guarded(model, torch.optim.AdamW([p]), loss_fn=lambda m, b: (m.p * b).abs().square().sum())
    assert "complex" in guard.path
    guard.train_step(torch.tensor(1.0))
    guard.train_step(torch.tensor(NAN))
    assert [i.step for i in guard.incidents] == [1] and bool(torch.isfinite(p.abs()).all())


def test_an_optimizer_that_is_no_subclass_of_torchs_works():
    class Bare:
        def __init__(self, params):
            self.param_groups, self.state = [{"params": list(params), "lr": 0.1}], {}

        def zero_grad(self):
            for p in self.param_groups[0]["params"]:
                p.grad = None

        def step(self):
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p -= 0.1 * p.grad

    model = net()
    guard = guarded(model, Bare(model.parameters()))
    for batch in (batches(1)[0], poison(batches(1)[0])):
        guard.train_step(batch)
    assert [i.step for i in guard.incidents] == [1] and all(bool(torch.isfinite(p).all()) for p in model.parameters())


def test_parameters_added_while_training_are_guarded_too():
    model = net()
    optimizer = torch.optim.AdamW(model[0].parameters())
    guard = guarded(model, optimizer, policy=nanproof.Policy(lag=2))
    data = batches(8)
    data[6] = poison(data[6])
    for i, batch in enumerate(data):
        if i == 3:
            optimizer.add_param_group({"params": [*model[4].parameters()]})
        guard.train_step(batch)
    guard.close()
    assert len(guard.history[0].names) == 2 and len(guard.history[-1].names) == 4
    assert [i.step for i in guard.incidents] == [6] and finite(model, optimizer)


def test_loading_an_optimizer_keeps_it_fused():
    model = net()
    plain = torch.optim.AdamW(model.parameters())
    mse(model, batches(1)[0]).backward()
    plain.step()
    saved = copy.deepcopy(plain.state_dict())
    optimizer = torch.optim.AdamW(model.parameters())
    guard = guarded(model, optimizer)
    optimizer.load_state_dict(saved)
    assert all(group["fused"] for group in optimizer.param_groups)
    for batch in (batches(1)[0], poison(batches(1)[0])):
        guard.train_step(batch)
    assert [i.step for i in guard.incidents] == [1] and finite(model, optimizer)
    assert {float(s["step"]) for s in optimizer.state.values()} == {2.0}


@pytest.mark.parametrize("first", ["fused=True", "another guard's"])
def test_an_old_checkpoint_does_not_unfuse_a_fused_optimizer(first):
    model = net()
    old = copy.deepcopy(torch.optim.AdamW(model.parameters()).state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True if first == "fused=True" else None)
    if first != "fused=True":
        guarded(model, optimizer).close()
    guard = guarded(model, optimizer)
    optimizer.load_state_dict(old)
    for batch in (batches(1)[0], poison(batches(1)[0])):
        guard.train_step(batch)
    assert [i.step for i in guard.incidents] == [1] and finite(model, optimizer)


@pytest.mark.parametrize("momentum", [0.9])
@pytest.mark.parametrize(("dampening", "path"), [(0.0, "device"), (0.5, "host")])
def test_a_refused_first_step_of_sgd_leaves_its_momentum_sound(momentum, dampening, path):
    results = []
    for saw_bad in (True, False):
        torch.manual_seed(0)
        model = net(dropout=0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum, dampening=dampening)
        guard = guarded(model, optimizer)
        assert guard.path.startswith(path)
        data = batches(4)
        for batch in ([poison(data[0])] if saw_bad else []) + data:
            guard.train_step(batch)
        results.append(whole_state(model, optimizer))
    assert Run(guard, results[0]).same_as(Run(guard, results[1])) == []


def test_wrapped_optimizers_are_unwrapped():
    accelerate = pytest.importorskip("accelerate")
    model = net()
    inner = torch.optim.AdamW(model.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outer = accelerate.Accelerator(cpu=True).prepare(inner)
    guard = guarded(model, outer)
    assert guard.optimizer is inner and guard.path.startswith("device")


def test_wrappers_that_do_something_are_not_taken_off():
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer, self.steps = optimizer, 0
            self.param_groups, self.state, self.defaults = optimizer.param_groups, optimizer.state, optimizer.defaults

        def zero_grad(self):
            self.optimizer.zero_grad()

        def step(self):
            self.steps += 1
            self.optimizer.step()

    model = net()
    outer = Lookahead(torch.optim.AdamW(model.parameters()))
    guard = guarded(model, outer)
    for batch in batches(3):
        guard.train_step(batch)
    assert guard.path == "host: Lookahead steps the optimizers inside it itself" and outer.steps == 3


@pytest.mark.parametrize("compiled", ["model", "optimizer"])
def test_compiled_models_and_optimizers_work(compiled):
    torch._dynamo.reset()
    model = net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    target = model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if compiled == "model":
            target = torch.compile(model, backend="aot_eager")
        else:
            optimizer.step = torch.compile(optimizer.step, backend="aot_eager")
        data = batches(6)
        data[3] = poison(data[3])
        with guarded(target, optimizer, policy=nanproof.Policy(lag=2)) as guard:
            for batch in data:
                guard.train_step(batch)
    assert [i.step for i in guard.incidents] == [3] and finite(model, optimizer)
    assert guard.history[0].names[0] == "0.weight"


def test_a_loss_with_parameters_of_its_own_is_healthy():
    model, temperature = net(), nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW([*model.parameters(), temperature])
    guard = guarded(model, optimizer, loss_fn=lambda m, b: mse(m, b) * temperature.exp())
    guard.train_step(batches(1)[0])
    guard.close()
    assert guard.incidents == []
    assert "param_groups[0].params[6]" in guard.history[0].by_parameter


def test_a_layer_unfrozen_while_training_gets_its_momentum():
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    guard = guarded(model, optimizer)
    data = batches(4)
    guard.train_step(data[0])
    model[0].requires_grad_(True)
    before = model[0].weight.detach().clone()
    guard.train_step(poison(data[1]))
    assert torch.equal(model[0].weight, before)
    guard.train_step(data[2])
    assert not torch.equal(model[0].weight, before) and finite(model, optimizer)


def test_guarded_optimizers_say_which_path_they_take():
    model = net()
    paths = {name: guarded(model, make(model.parameters())).path for name, make in OPTIMIZERS.items()}
    assert paths["AdamW-fused"] == "device"
    assert paths["AdamW-default"] == "device: AdamW switched to fused"
    assert paths["AdamW-foreach"] == "host: AdamW(foreach=True) was asked for"
    assert paths["AdamW-single"] == "host: AdamW(foreach=False) was asked for"
    assert paths["Lion"] == "host: Lion has no fused form"
    assert guarded(model, Lion(model.parameters()), policy=nanproof.Policy(lag=2)).parts.stepper.lag == 0
