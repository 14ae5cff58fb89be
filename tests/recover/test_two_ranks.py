"""Two ranks (gloo): checkpoints of DDP and FSDP2 runs, resharding, and going back together."""

from __future__ import annotations

import math
import shutil
import signal
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import nanproof
from nanproof.core import _stopping
from nanproof.core.judge._parameters import local
from toys import batches, mse, poison
from zoo.two_ranks import two_ranks


def build(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 17), nn.LayerNorm(17), nn.ReLU(), nn.Linear(17, 1))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp2":
        fully_shard(model[0])
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)


def guarded(kind, folder=None, **policy):
    model, optimizer, scheduler = build(kind)
    where = nanproof.Checkpoints(folder, every=10, prove=3) if isinstance(folder, str) else folder
    policy = nanproof.Policy(diagnose=policy.pop("diagnose", "never"), **policy)
    return nanproof.Guard(model, optimizer, loss_fn=mse, scheduler=scheduler, policy=policy, checkpoints=where)


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def state(guard):
    """Weights and moments, whole."""
    return {name: whole(t) for name, t in guard.parts.recovery.state.tensors().items() if name.startswith(("model", "optim"))}


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


def signalled(rank, kind, folder):
    """Only one rank is told to stop: both save and leave at the same step, and go on from it."""
    data = batches(40, seed=rank + 1)
    through = guarded(kind)
    for batch in data:
        through.train_step(batch)
    expected = state(through)
    _stopping.EVERY = 0.01  # seconds between two exchanges: this run is over in less than the usual two
    where = nanproof.Checkpoints(folder, every=100, on_signal=True, exit_status=9)
    first, status = guarded(kind, where), None
    try:
        for step, batch in enumerate(data):
            if step == 3 and rank == 1:
                signal.raise_signal(signal.SIGTERM)
            first.train_step(batch)
    except SystemExit as left:
        status = left.code
    second = guarded(kind, where)
    start = second.resume()
    for batch in data[start:]:
        second.train_step(batch)
    second.close()
    return {"status": status, "left": start == first.next_step and start > 3, "same": equal(state(second), expected)}


def both(rank, kind, folder):
    """Train 25 steps and save; a new guard resumes at 20 and goes on: the same as without a break."""
    data = batches(40, seed=rank + 1)
    first = guarded(kind, folder)
    for batch in data[:25]:
        first.train_step(batch)
    first.parts.recovery.close(alone=False)
    fresh = guarded(kind, folder)
    step = fresh.resume()
    at_20 = state(fresh)
    for batch in data[20:]:
        fresh.train_step(batch)
    undisturbed = guarded(kind)
    for batch in data[:20]:
        undisturbed.train_step(batch)
    right_at_20 = equal(at_20, state(undisturbed))
    for batch in data[20:]:
        undisturbed.train_step(batch)
    if rank == 0:
        torch.save(at_20, folder + ".at20")
    fresh.close()
    return {"step": step, "at 20": right_at_20, "at 40": equal(state(fresh), state(undisturbed))}


def onto_two(rank, kind, folder):
    """A checkpoint of one process, loaded by two ranks."""
    guard = guarded(kind, folder)
    step = guard.resume()
    found, wanted = state(guard), torch.load(folder + ".at20")
    guard.train_step(batches(1)[0])
    guard.close()
    return {
        "step": step,
        "same": equal(found, wanted),
        "finite": all(bool(torch.isfinite(w).all()) for w in state(guard).values()),
    }


def poisoned(rank, kind):
    """A weight on one rank is poisoned: both go back, to the state of the same step."""
    ends = []
    for harm in (True, False):
        guard = guarded(kind, snapshot_every=10)
        data = guard.wrap(batches(40, seed=rank + 1))
        done = False
        for batch in data:
            if harm and guard.next_step == 24 and not done:
                done = True
                if rank == 1:
                    with torch.no_grad():
                        local(next(guard.model.parameters()))[0, 0] = math.nan
            guard.train_step(batch)
        ends.append((state(guard), [[i.kind, i.action, i.restored_step] for i in guard.incidents], guard.next_step))
    (disturbed, incidents, steps), (undisturbed, _, _) = ends
    return {"same": equal(disturbed, undisturbed), "incidents": incidents, "steps": steps}


def salvaged(rank, kind):
    """One rank's batch has a bad sample: that rank trains on the rest of it, the other on all of its own."""
    ends = []
    for saw_bad in (True, False):
        guard = guarded(kind, salvage=True, diagnose="new")
        data = batches(12, seed=rank + 1)
        if rank == 1:
            bad = poison(data[5])
            data[5] = bad if saw_bad else [torch.cat([t[:2], t[3:]]) for t in data[5]]
        for batch in data:
            guard.train_step(batch)
        ends.append((state(guard), [[i.action, list(i.left_out), i.rank, list(i.quarantined)] for i in guard.incidents]))
    return {"same": equal(ends[0][0], ends[1][0]), "incidents": ends[0][1]}


def job(name, **kwargs):
    return f"recover.test_two_ranks:{name}", (), kwargs


def test_two_ranks_save_and_go_on_bit_for_bit_and_one_can_take_over(tmp_path):
    """Resumed by two ranks: the run of before. Resumed by one process: the same weights and moments, whole."""
    folders = {kind: str(tmp_path / kind) for kind in ("ddp", "fsdp2")}
    for ranks in two_ranks(*(job("both", kind=kind, folder=folder) for kind, folder in folders.items())):
        for found in ranks:
            assert found == {"step": 20, "at 20": True, "at 40": True}
    for folder in folders.values():
        for path in Path(folder).glob("step-000000[34]0*"):
            shutil.rmtree(path)
        alone = guarded("alone", folder)
        assert alone.resume() == 20
        assert equal(state(alone), torch.load(folder + ".at20"))
        alone.close()


def test_a_checkpoint_of_one_process_is_spread_over_two_ranks(tmp_path):
    folder = str(tmp_path / "one")
    guard = guarded("alone", folder)
    for i, batch in enumerate(batches(24)):
        guard.train_step(batch)
        if i == 19:
            torch.save(state(guard), folder + ".at20")
    guard.parts.recovery.close(alone=False)
    for kind in ("ddp", "fsdp2"):
        shutil.copytree(folder, folder + kind)
        shutil.copy(folder + ".at20", folder + kind + ".at20")
    for ranks in two_ranks(*(job("onto_two", kind=kind, folder=folder + kind) for kind in ("ddp", "fsdp2"))):
        for found in ranks:
            assert found == {"step": 20, "same": True, "finite": True}


def test_ranks_go_back_together_and_share_the_loss_of_a_sample():
    """A weight that is poisoned on one rank sends both back. A bad sample on one rank is left out there, and nowhere else."""
    *poison, salvage = two_ranks(job("poisoned", kind="ddp"), job("poisoned", kind="fsdp2"), job("salvaged", kind="ddp"))
    for found in (found for ranks in poison for found in ranks):
        assert found == {"same": True, "incidents": [["nonfinite-weight", "rewound", 20]], "steps": 40}
    for found in salvage:
        assert found["same"], found
        assert found["incidents"] == [["salvaged", [2], 1, []]]


def test_a_signal_to_one_rank_stops_both_at_the_same_step(tmp_path):
    kinds = ("ddp", "fsdp2")
    for ranks in two_ranks(*(job("signalled", kind=kind, folder=str(tmp_path / kind)) for kind in kinds)):
        for found in ranks:
            assert found == {"status": 9, "left": True, "same": True}
