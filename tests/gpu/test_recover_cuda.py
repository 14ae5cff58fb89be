"""Copies, checkpoints and going back on a CUDA device: nothing waits, nothing is lost."""

from __future__ import annotations

import math
import os
import tempfile

import pytest
import torch
from torch import nn

import nanproof
from recover.runs import loader, once, poison_buffer, poison_unused_moment, poison_weight, same, train, weights
from toys import mse, net, syncs_raise

pytestmark = pytest.mark.gpu


def on_device(model, batch):
    return mse(model, [t.cuda(non_blocking=True) for t in batch])


def made(tmp_path=None, scaler=False, **policy):
    torch.manual_seed(0)
    model = net().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    where = None if tmp_path is None else nanproof.Checkpoints(tmp_path, every=10, prove=3)
    policy = nanproof.Policy(**{"diagnose": "never", **policy})
    grad_scaler = torch.amp.GradScaler("cuda", init_scale=256.0) if scaler else None
    return nanproof.Guard(
        model, optimizer, loss_fn=on_device, scheduler=schedule, policy=policy, checkpoints=where, scaler=grad_scaler
    )


@pytest.mark.parametrize("place", ["host", "device", "disk"])
@pytest.mark.parametrize("harm", [poison_weight, poison_unused_moment, poison_buffer])
def test_a_poisoned_run_ends_as_if_nothing_had_happened(harm, place, tmp_path):
    undisturbed = made()
    train(undisturbed, loader(), 60)
    undisturbed.sync()
    guard = made(tmp_path) if place == "disk" else made(snapshot_every=10, snapshot_to=place)
    train(guard, guard.wrap(loader()), 60, once(34, harm))
    guard.sync()
    while guard.next_step < 60:  # found by the last verdicts: the loop has to go on
        train(guard, guard.wrap(loader()), 60)
        guard.sync()
    assert same(weights(guard), weights(undisturbed)) == []
    (incident,) = guard.incidents
    assert incident.action == ("rolled-back" if place == "disk" else "rewound")
    assert incident.restored_from is not None and incident.restored_from.startswith("step-" if place == "disk" else "memory")
    guard.close()


def test_a_poisoned_loss_scale_is_put_back():
    undisturbed = made(scaler=True)
    train(undisturbed, loader(), 50)
    undisturbed.sync()
    guard = made(scaler=True, snapshot_every=10)
    train(guard, guard.wrap(loader()), 50, once(24, lambda g: g.parts.stepper.scale.tensors()["scale"].fill_(math.nan)))
    guard.sync()
    assert same(weights(guard), weights(undisturbed)) == []
    assert [(i.kind, i.action) for i in guard.incidents] == [("loss-scale-collapse", "rewound")]


def test_a_new_process_goes_on_bit_for_bit(tmp_path):
    whole = made()
    train(whole, loader(), 70)
    whole.sync()
    killed = made(tmp_path)
    train(killed, killed.wrap(loader()), 47)
    killed.parts.recovery.close(alone=False)
    fresh = made(tmp_path)
    data = fresh.wrap(loader(seed=99))
    torch.randn(3, device="cuda")
    assert fresh.resume() == 40
    train(fresh, data, 70)
    fresh.sync()
    assert same(weights(fresh), weights(whole)) == []
    fresh.close()


def test_copies_to_the_host_do_not_wait():
    """40 steps, a copy every 5, with every host sync an error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    guard = nanproof.Guard(
        model,
        optimizer,
        loss_fn=lambda m, x: (m(x) - x).square().mean(),
        policy=nanproof.Policy(snapshot_every=5, diagnose="never"),
    )
    x = torch.randn(32, 64, device="cuda")
    for _ in range(25):
        guard.train_step(x)
    with syncs_raise():
        for _ in range(40):
            guard.train_step(x)
    guard.sync()
    assert [s.step for s in guard.parts.recovery.snapshots.kept] == [60, 65]


@pytest.mark.parametrize("room", [True, False])
def test_a_copy_is_of_its_moment_even_while_training_goes_on(room, monkeypatch):
    """Large weights: the copy takes longer than a step's launch, and the optimizer must not overtake it; with and without room
    on the device for a copy on the way."""
    if not room:
        monkeypatch.setattr("nanproof.recover.state._snapshots.Snapshots._aside", lambda *_: None)
    torch.manual_seed(0)
    model = nn.Linear(4096, 4096, bias=False).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    policy = nanproof.Policy(snapshot_every=4, diagnose="never")
    guard = nanproof.Guard(model, optimizer, loss_fn=lambda m, x: m.weight.sum() + 0 * x.sum(), max_norm=None, policy=policy)
    start = model.weight.detach().clone()
    for _ in range(20):
        guard.train_step(torch.zeros(1, device="cuda"))
    guard.sync()
    for snapshot in guard.parts.recovery.snapshots.kept:
        snapshot.wait()
        wanted = start.clone()
        for _ in range(snapshot.step):
            wanted -= 1.0
        assert torch.equal(snapshot.copies["model.weight"], wanted.cpu())


def test_fsdp2_on_one_device_saves_and_resumes(tmp_path):
    """World of one over NCCL: sharded parameters on a CUDA mesh, copies in host memory."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("nccl", init_method=f"file://{file.name}x", rank=0, world_size=1)
        try:

            def build():
                torch.manual_seed(0)
                model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1)).cuda()
                fully_shard(model[0])
                fully_shard(model)
                where = nanproof.Checkpoints(tmp_path, every=10, prove=2, background=False)
                optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
                return nanproof.Guard(
                    model, optimizer, loss_fn=on_device, checkpoints=where, policy=nanproof.Policy(diagnose="never")
                )

            first = build()
            train(first, first.wrap(loader()), 26)
            first.parts.recovery.close(alone=False)
            fresh = build()
            data = fresh.wrap(loader(seed=5))
            assert fresh.resume() == 20
            train(fresh, data, 40)
            assert all(torch.isfinite(p.full_tensor()).all() for p in fresh.model.parameters())
            fresh.close()
        finally:
            dist.destroy_process_group()
            if os.path.exists(file.name + "x"):
                os.unlink(file.name + "x")
