"""What only a CUDA device can show: the oracle with a real lag, no host sync, and the fused kernels there. `pytest -m gpu`."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import nanproof
from toys import Lion, Run, batches, finite, mse, net, poison, whole_state

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
    with nanproof.Guard(model, optimizer, loss_fn=mse, scheduler=scheduler, max_norm="auto") as guard:
        for i, batch in enumerate(data):
            if i == 10:
                torch.cuda.synchronize()
                torch.cuda.set_sync_debug_mode("error")
            try:
                if whole:
                    guard.train_step(batch)
                else:
                    optimizer.zero_grad()
                    loss = mse(model, batch)
                    guard.backward(loss)
                    guard.step(loss)
            finally:
                if i == len(data) - 1:
                    torch.cuda.set_sync_debug_mode("default")
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
