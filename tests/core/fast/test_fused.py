"""A fused step with kept lists against `optimizer.step()`, bit for bit, and what must be left to `optimizer.step()`."""

import copy
import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_post_hook

import nanproof
from nanproof.core.fast._fused import FusedStep
from nanproof.core.judge._parameters import Parameters


def _net(dtype=torch.float32):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3, bias=False), nn.LayerNorm(3)).to(dtype)


def _give_gradients(model, step, absent=()):
    generator = torch.Generator().manual_seed(step)
    for i, p in enumerate(model.parameters()):
        p.grad = None if i in absent else torch.randn(p.shape, generator=generator).to(p.dtype)


def _reference(optimizer, skip, divisor):
    optimizer.found_inf = skip
    if divisor is not None:
        optimizer.grad_scale = divisor
    try:
        optimizer.step()
    finally:
        del optimizer.found_inf
        if divisor is not None:
            del optimizer.grad_scale


class Pair:
    """Two equal models; one optimizer is stepped by torch, the other by kept lists."""

    def __init__(self, make, dtype=torch.float32):
        self.models = [_net(dtype) for _ in range(2)]
        self.optimizers = [make(model) for model in self.models]
        self.taken = 0
        self._fused = None

    def step(self, step, skip=False, divisor=None, absent=()):
        for model in self.models:
            _give_gradients(model, step, absent)
        flag = torch.tensor(float(skip))
        scale = None if divisor is None else torch.tensor(divisor)
        _reference(self.optimizers[0], flag, scale)
        parameters = Parameters(self.models[1], self.optimizers[1])
        present, gradients = parameters.present_gradients()
        fused = self._fused
        if fused is not None and fused.present.absent == present.absent and fused.take(flag, scale, gradients):
            self.taken += 1
            self.compare()
            return
        _reference(self.optimizers[1], flag, scale)
        self._fused = FusedStep(self.optimizers[1], present, gradients, frozenset())
        self.compare()

    def compare(self):
        for p, q in zip(*(model.parameters() for model in self.models), strict=True):
            assert torch.equal(p, q)
            assert (p.grad is None) == (q.grad is None)
            a, b = self.optimizers[0].state.get(p, {}), self.optimizers[1].state.get(q, {})
            assert a.keys() == b.keys()
            assert all(torch.equal(a[k], b[k]) for k in a if a[k] is not None)


def _sgd(**options):
    def make(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True, **options)
        for p in model.parameters():
            if optimizer.defaults["momentum"]:
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return optimizer

    return make


def _adam(kind, **options):
    return lambda model: kind(model.parameters(), fused=True, **options)


MAKERS = {
    **{
        f"{kind.__name__} amsgrad={amsgrad} maximize={maximize} decay={decay}": _adam(
            kind, lr=1e-2, amsgrad=amsgrad, maximize=maximize, weight_decay=decay
        )
        for kind, amsgrad, maximize, decay in itertools.product(
            (torch.optim.Adam, torch.optim.AdamW), (False, True), (False, True), (0.0, 0.1)
        )
    },
    "AdamW lr tensor": lambda model: torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2), fused=True),
    "SGD": _sgd(),
    "SGD momentum": _sgd(momentum=0.9),
    "SGD nesterov": _sgd(momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD maximize": _sgd(momentum=0.5, maximize=True),
    "two groups": lambda model: torch.optim.AdamW(
        [{"params": list(model[0].parameters()), "lr": 0.1}, {"params": [*model[1].parameters(), *model[2].parameters()]}],
        lr=1e-2,
        fused=True,
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", MAKERS)
def test_it_is_the_optimizers_own_step_bit_for_bit(name, dtype):
    """Twelve steps: taken, clipped and skipped ones, and a learning rate that changes."""
    if dtype == torch.bfloat16 and name.startswith("SGD"):
        pytest.skip("torch's fused SGD over half-precision weights is wrong on CPU, so it is not used")
    pair = Pair(MAKERS[name], dtype)
    for step in range(12):
        pair.step(step, skip=step in (3, 7), divisor=[None, 1.0, 2.5][step % 3])
        for optimizer in pair.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * 0.9
    assert pair.taken == 11


def test_absent_gradients_and_patterns_that_change():
    pair = Pair(MAKERS["two groups"])
    for step, absent in enumerate([(), (), (1,), (1,), (0, 2), (), (4,), (4,)]):
        pair.step(step, absent=absent)
    assert pair.taken == 3


def test_state_that_was_replaced_is_noticed():
    """One moment, all of an entry, or everything through load_state_dict."""
    pair = Pair(MAKERS["AdamW amsgrad=False maximize=False decay=0.1"])
    pair.step(0)
    pair.step(1)
    for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
        p = next(model.parameters())
        optimizer.state[p]["exp_avg"] = torch.full_like(p, 0.5)
    pair.step(2)
    pair.step(3)
    for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
        p = list(model.parameters())[2]
        optimizer.state[p] = {k: v.clone() for k, v in optimizer.state[p].items()}
        optimizer.state[p]["exp_avg_sq"].mul_(3)
    pair.step(4)
    pair.step(5)
    for optimizer in pair.optimizers:
        saved = copy.deepcopy(optimizer.state_dict())
        saved["param_groups"][0]["lr"] = 0.3
        optimizer.load_state_dict(saved)
    pair.step(6)
    pair.step(7)
    for optimizer in pair.optimizers:
        optimizer.param_groups[0]["betas"] = (0.5, 0.6)
        optimizer.param_groups[0]["amsgrad"] = True
        for state in optimizer.state.values():
            state["max_exp_avg_sq"] = torch.zeros_like(state["exp_avg"])
    pair.step(8)
    pair.step(9)
    pair.step(10)
    for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
        optimizer.state[next(model.parameters())].clear()
    pair.step(11)
    pair.step(12)
    assert pair.taken == 7


def test_a_parameter_that_moves_to_another_group_gets_its_settings():
    """From the end of one group to the beginning of the next: all groups together hold the same tensors in the same order."""
    pair = Pair(MAKERS["two groups"])
    pair.step(0)
    pair.step(1)
    for optimizer in pair.optimizers:
        first, second = optimizer.param_groups
        second["params"].insert(0, first["params"].pop())
    pair.step(2)
    pair.step(3)
    assert pair.taken == 2


def _ready():
    pair = Pair(MAKERS["AdamW amsgrad=False maximize=False decay=0.1"])
    pair.step(0)
    pair.step(1)
    assert pair.taken == 1
    return pair


def _untaken(pair):
    taken = pair.taken
    pair.step(2)
    return pair.taken == taken


def test_hooks_see_every_step():
    for register in ("register_step_pre_hook", "register_step_post_hook"):
        pair, calls = _ready(), []
        for optimizer in pair.optimizers:
            getattr(optimizer, register)(lambda *_, calls=calls: calls.append(1))
        assert _untaken(pair) and len(calls) == 2
    pair, calls = _ready(), []
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        assert _untaken(pair) and len(calls) == 2
    finally:
        handle.remove()


def test_a_wrapped_step_is_called():
    pair, calls = _ready(), []
    optimizer = pair.optimizers[1]
    own = optimizer.step
    optimizer.step = lambda *args: (calls.append(1), own(*args))[1]
    assert _untaken(pair) and calls == [1]


def test_a_step_wrapped_on_the_class_is_called(monkeypatch):
    pair, calls = _ready(), []
    own = torch.optim.AdamW.step
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, *args: (calls.append(1), own(self, *args))[1])
    assert _untaken(pair) and len(calls) == 2


def test_a_subclass_is_left_to_itself():
    class Mine(torch.optim.AdamW):
        pass

    pair = Pair(lambda model: Mine(model.parameters(), fused=True))
    for step in range(3):
        pair.step(step)
    assert pair.taken == 0


def test_the_profiler_sees_the_step_by_its_name():
    pair = _ready()
    with torch.profiler.profile() as profile:
        assert _untaken(pair)
    assert any(event.key == "Optimizer.step#AdamW.step" for event in profile.key_averages())


def test_a_schedule_notices_the_step():
    """A schedule wraps `step` to warn if it is advanced first; the kept lists go past the wrapper and tell it."""
    pair = _ready()
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in pair.optimizers]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2, 5):
            pair.step(step)
            for schedule in schedules:
                schedule.step()
    assert pair.taken == 4


def test_a_guard_uses_it():
    """After the first step, no call of a guard reaches torch's `_init_group`."""
    model = _net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    calls = []
    own = torch.optim.AdamW._init_group
    with nanproof.Guard(model, optimizer) as guard, pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "_init_group", lambda self, *args: (calls.append(1), own(self, *args))[1])
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().mean()
            loss.backward()
            guard.step(loss)
    assert len(calls) == 1


def test_sharded_weights_take_the_same_step(tmp_path):
    """Under `fully_shard`, the kernels get this rank's parts; the sharded tensors count as written."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        models, optimizers = [], []
        for _ in range(2):
            model = _net()
            fully_shard(model)
            models.append(model)
            optimizers.append(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, amsgrad=True))
        fused = None
        for step in range(5):
            for model in models:
                model.zero_grad()
                model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            skip, divisor = torch.tensor(float(step == 3)), torch.tensor(2.0)
            _reference(optimizers[0], skip, divisor)
            present, gradients = Parameters(models[1], optimizers[1]).present_gradients()
            before = [p._version for p in models[1].parameters()]
            if fused is None:
                _reference(optimizers[1], skip, divisor)
                fused = FusedStep(optimizers[1], present, gradients, frozenset())
            else:
                assert fused.take(skip, divisor, gradients)
                assert step == 3 or all(p._version > version for p, version in zip(models[1].parameters(), before, strict=True))
            for p, q in zip(*(model.parameters() for model in models), strict=True):
                assert torch.equal(p.to_local(), q.to_local()) and torch.equal(p.grad.to_local(), q.grad.to_local())
                a, b = optimizers[0].state[p], optimizers[1].state[q]
                assert torch.equal(a["step"], b["step"])
                assert all(torch.equal(a[k].to_local(), b[k].to_local()) for k in a if k != "step")
    finally:
        dist.destroy_process_group()
