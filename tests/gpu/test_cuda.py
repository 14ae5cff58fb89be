"""What only a CUDA device can show: the oracle with a real lag, no host sync, and the fused kernels there. `pytest -m gpu`."""

from __future__ import annotations

import copy
import math
import warnings

import pytest
import torch
from torch import nn

import nanproof
from nanproof.core.fast._kernels import Kernels
from nanproof.core.judge._stats import RunningStats
from nanproof.core.judge._verdict import judge
from toys import Lion, Run, batches, finite, mse, net, poison, syncs_raise, whole_state

pytestmark = pytest.mark.gpu
BAD = {0, 3, 4, 7, 19}
STEPS = 20


def to_cuda(batch):
    return [x.cuda() for x in batch]


def mse_amp(model, batch):
    with torch.autocast("cuda", dtype=torch.float16):
        out = model(batch[0])
    return nn.functional.mse_loss(out.squeeze(-1).float(), batch[1])


OPTIMIZERS = {
    "AdamW fused": (lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True), "device"),
    "AdamW default": (lambda ps: torch.optim.AdamW(ps, lr=1e-2), "device: AdamW switched to fused"),
    "Adam fused": (lambda ps: torch.optim.Adam(ps, lr=1e-2, fused=True), "device"),
    "SGD fused": (lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, fused=True), "device"),
    "AdamW foreach": (lambda ps: torch.optim.AdamW(ps, lr=1e-2, foreach=True), "host: AdamW(foreach=True) was asked for"),
    "Adagrad": (lambda ps: torch.optim.Adagrad(ps, lr=1e-2), "host: fused Adagrad does not run on cuda"),
    "Lion": (Lion, "host: Lion has no fused form"),
}


def train(name, precision, saw_bad, **kwargs):
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bf16 weights" else torch.float32
    model = net().cuda().to(dtype)
    make, path = OPTIMIZERS[name]
    optimizer = make(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, STEPS, cycle_momentum="SGD" in name)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10, growth_interval=3) if precision == "fp16 + scaler" else None
    guard = nanproof.Guard(model, optimizer, loss_fn=mse_amp if scaler else mse, scaler=scaler, scheduler=scheduler, **kwargs)
    assert guard.path == path
    for i, batch in enumerate(batches(STEPS, dtype=dtype)):
        if i in BAD and not saw_bad:
            continue
        guard.train_step(to_cuda(poison(batch) if i in BAD else batch))
    state = whole_state(model, optimizer, scheduler, scaler, guard)
    state["cuda random"] = torch.cuda.get_rng_state()
    guard.close()
    assert finite(model, optimizer)
    return Run(guard, state)


@pytest.mark.parametrize("precision", ["fp32", "bf16 weights", "fp16 + scaler"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bad_batch_leaves_no_trace_with_a_real_lag(name, precision):
    disturbed, oracle = (train(name, precision, saw) for saw in (True, False))
    assert [i.step for i in disturbed.guard.incidents] == sorted(BAD)
    assert oracle.guard.incidents == []
    assert [r.step for r in disturbed.guard.history] == list(range(STEPS))
    assert disturbed.same_as(oracle) == []


@pytest.mark.parametrize("whole", [True, False])
def test_the_host_never_waits(whole):
    """BatchNorm's buffers, clipping, telemetry, a schedule: 50 steps under the mode that raises at a sync."""
    model = net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    data = [to_cuda(b) for b in batches(60)]

    def one(guard, batch):
        if whole:
            guard.train_step(batch)
        else:
            optimizer.zero_grad()
            loss = mse(model, batch)
            guard.backward(loss)
            guard.step(loss)

    with nanproof.Guard(model, optimizer, loss_fn=mse, scheduler=scheduler, max_norm="auto") as guard:
        for batch in data[:10]:
            one(guard, batch)
        with syncs_raise():
            for batch in data[10:]:
                one(guard, batch)
    assert len(guard.history) == 60 and guard.incidents == []


def test_a_model_on_two_devices():
    class Split(nn.Module):
        def __init__(self):
            super().__init__()
            self.far, self.near = nn.Linear(6, 16).cuda(), nn.Linear(16, 1)

        def forward(self, x):
            return self.near(self.far(x.cuda()).relu().cpu())

    model = Split()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with nanproof.Guard(model, optimizer, loss_fn=mse) as guard:
        for i, batch in enumerate(batches(8)):
            guard.train_step(poison(batch) if i == 4 else batch)
    assert [i.step for i in guard.incidents] == [4] and finite(model, optimizer)
    assert set(guard.history[0].by_parameter) == {"far.weight", "far.bias", "near.weight", "near.bias"}


def test_the_fused_step_agrees_with_the_plain_one():
    """Clip + step by hand against the guard, 30 steps: within 1e-5."""
    results = []
    for guarded in (True, False):
        torch.manual_seed(0)
        model = net(batch_norm=False, dropout=0.0).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        guard = nanproof.Guard(model, optimizer, loss_fn=mse, max_norm=0.05) if guarded else None
        for batch in map(to_cuda, batches(30)):
            if guard:
                guard.train_step(batch)
            else:
                optimizer.zero_grad()
                mse(model, batch).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
        if guard:
            guard.close()
        results.append(copy.deepcopy(model.state_dict()))
    for key, value in results[0].items():
        torch.testing.assert_close(value, results[1][key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_fused_sgd_over_half_weights_is_right_on_cuda(dtype, momentum):
    """It is not on CPU; the guard would have to avoid it here too."""
    results = []
    for fused in (True, False):
        p = nn.Parameter(torch.ones(64, dtype=dtype, device="cuda"))
        optimizer = torch.optim.SGD([p], lr=0.1, momentum=momentum, fused=fused, foreach=False)
        for i in range(4):
            p.grad = torch.linspace(-1, 1, 64, device="cuda").to(dtype) * (i + 1)
            optimizer.step()
        results.append(p.detach().float())
    torch.testing.assert_close(results[0], results[1], rtol=2e-2, atol=2e-2)


def test_compiled_models_work():
    model = net(dropout=0.0).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with nanproof.Guard(torch.compile(model), optimizer, loss_fn=mse) as guard:
            for i, batch in enumerate(map(to_cuda, batches(8))):
                guard.train_step(poison(batch) if i == 4 else batch)
    assert [i.step for i in guard.incidents] == [4] and finite(model, optimizer)


def test_fsdp2_on_one_rank(tmp_path):
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = net(batch_norm=False).cuda()
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with nanproof.Guard(model, optimizer, loss_fn=mse) as guard:
            for i, batch in enumerate(map(to_cuda, batches(8))):
                guard.train_step(poison(batch) if i == 4 else batch)
        assert [i.step for i in guard.incidents] == [4]
    finally:
        dist.destroy_process_group()


SHAPES = [(1,), (3,), (7, 9), (4096,), (4097,), (65536,), (65537,), (300, 1000), (1000003,)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_norm_kernel_agrees_with_float64(dtype):
    """Within 1e-6 of the truth, for sizes around its chunks, whatever the addresses."""
    kernels = Kernels.available(torch.device("cuda", 0), torch.float32)
    assert kernels is not None
    for seed in range(5):
        torch.manual_seed(seed)
        gradients = [(torch.randn(shape, device="cuda") * 10.0 ** (seed - 2)).to(dtype) for shape in SHAPES]
        truth = torch.stack([g.double().norm() for g in gradients])
        torch.testing.assert_close(kernels.norms(gradients).double(), truth, rtol=1e-6, atol=0)
    for bad in (float("nan"), float("inf"), -float("inf")):
        gradients[7][299, 999] = bad
        norms = kernels.norms(gradients).tolist()
        assert [math.isfinite(x) for x in norms] == [i != 7 for i in range(len(SHAPES))]
        assert (norms[7] != norms[7]) == (bad != bad)


@pytest.mark.parametrize("max_norm", [None, 0.5, "auto"])
@pytest.mark.parametrize("skip_spikes", [True, False])
@pytest.mark.parametrize("loss_decides", [True, False])
def test_the_verdict_kernel_agrees_with_plain_torch(max_norm, skip_spikes, loss_decides):
    """400 steps with NaN, Inf, spikes, a new level, bad buffers and a latch: the same decisions, numbers within 1e-4."""
    device = torch.device("cuda", 0)
    kernels = Kernels.available(device, torch.float32)
    g = torch.Generator().manual_seed(3)
    stats = [RunningStats(device, torch.float32, 20, 8.0) for _ in range(2)]
    latches = [torch.zeros((), device=device) for _ in range(2)]
    for step in range(400):
        norms = torch.rand(130, generator=g).exp() * (50 if 200 < step < 260 else 1)
        loss = torch.rand((), generator=g) + (2 if step < 300 else -0.5)
        kind = int(torch.randint(0, 12, (), generator=g))
        if kind == 0:
            norms[5] = float("nan")
        elif kind == 1:
            loss = loss * float("inf")
        elif kind == 2:
            norms *= 1e4
        elif kind == 3:
            norms[7] = 3e38
        buffer = torch.tensor(17 if kind == 4 else 0, device=device)
        norms, loss = norms.to(device), loss.to(device)
        fast = kernels.judge(loss, norms, None, buffer, loss_decides, max_norm, stats[0], skip_spikes, latches[0])
        slow = judge(
            loss,
            norms,
            also_finite=None,
            bad_buffer=buffer,
            loss_decides=loss_decides,
            scale=None,
            max_norm=max_norm,
            stats=stats[1],
            skip_spikes=skip_spikes,
            held=latches[1] > 0,
        )
        assert fast.skip.item() == slow.skip.item(), step
        assert (fast.divisor is None) == (slow.divisor is None)
        torch.testing.assert_close(fast.packed, slow.packed, rtol=1e-4, atol=1e-4, equal_nan=True, msg=f"step {step}")
        refused = slow.skip > 0
        stats[1].take(slow.learned.point, slow.learned.loss, slow.learned.spike, ~refused)
        latches[1].copy_(torch.maximum(latches[1], refused.float()))
        assert latches[0].item() == latches[1].item()
        torch.testing.assert_close(stats[0].state, stats[1].state, rtol=1e-4, atol=1e-4, msg=f"step {step}")
        if step % 3 == 0:
            for latch in latches:
                latch.zero_()
    assert stats[0].count > 20


def test_the_kernels_are_in_use():
    model = net().cuda()
    guard = nanproof.Guard(model, torch.optim.AdamW(model.parameters()), loss_fn=mse)
    assert guard.parts.stepper.kernels is not None
