"""Two ranks (gloo): each observes its own activations, all go on after a bad batch on one, and no collective is added."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plain_hooks import PlainHooks, check
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import nanproof
from nanproof import Observe
from nanproof._records import ABSENT
from toys import batches, mse, poison
from zoo.two_ranks import two_ranks

STEPS, BAD = 6, 3
SITES = ["0", "1", "2", "3"]


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(6, 16), nn.LayerNorm(16), nn.Sequential(nn.Linear(16, 16), nn.ReLU()), nn.Linear(16, 1)
    )
    if kind == "ddp":
        return DistributedDataParallel(model)
    fully_shard(model[2])
    fully_shard(model)
    return model


def collectives() -> int:
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)


def healthy(rank: int, kind: str) -> Any:
    """Five healthy steps, compared with plain hooks on this rank; and how many collectives they took, observed and not."""
    counts, ends, ratios = [], [], []
    for observe in (None, Observe(modules=SITES, every=1)):
        model = build(kind)
        hooks = PlainHooks(model.module if kind == "ddp" else model, SITES)
        with nanproof.Guard(model, torch.optim.AdamW(model.parameters(), 1e-2), loss_fn=mse, observe=observe) as guard:
            data = batches(STEPS, seed=rank + 1)
            guard.train_step(data[0])
            before = collectives()
            for batch in data[1:]:
                hooks.take()
                guard.train_step(batch)
                if observe is not None:
                    check(guard.history[-1].observed, *hooks.take())
            counts.append(collectives() - before)
        ends.append([p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()])
        if observe is not None:
            ratios = [list(r.observed.updates["changed"]) for r in guard.history if r.observed]
    same = all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    first = guard.history[0].observed
    return {"counts": counts, "same": same, "sites": list(first.sites), "absmax": list(first.absmax), "changed": ratios}


def one_bad(rank: int, kind: str, lag: int) -> Any:
    """A bad batch on rank 1 only."""
    model = build(kind)
    data = batches(STEPS, seed=rank + 1)
    if rank == 1:
        data[BAD] = poison(data[BAD])
    policy = nanproof.Policy(lag=lag)
    observe = Observe(modules=SITES, every=1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with nanproof.Guard(model, optimizer, loss_fn=mse, observe=observe, policy=policy) as guard:
        for batch in data:
            guard.train_step(batch)
    records = [r.observed for r in guard.history]
    return {
        "incidents": [[i.step, i.rank] for i in guard.incidents],
        "actions": [r.action == "skipped" for r in guard.history],
        "finite": [r is not None and all(math.isfinite(x) for x in r.absmax) for r in records],
        "changed": [r is not None and set(r.updates["changed"]) - {ABSENT} == {0.0} for r in records],
        "forecasts": len(guard.forecasts),
    }


KINDS = ("ddp", "fsdp2")


@pytest.fixture(scope="module")
def results() -> dict[Any, Any]:
    jobs = [("test_ranks_observed:healthy", (kind,), {}) for kind in KINDS]
    jobs += [("test_ranks_observed:one_bad", (kind, lag), {}) for kind in KINDS for lag in (0, 2)]
    return {args: found for (_, args, _), found in zip(jobs, two_ranks(*jobs, timeout=30), strict=True)}


@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_sees_its_own(results, kind):
    zero, one = results[kind,]
    assert zero["same"] and one["same"]
    assert zero["counts"][0] == zero["counts"][1] == one["counts"][1] > 0
    assert zero["sites"] == one["sites"] == SITES
    assert zero["absmax"] != one["absmax"], "of other data"
    for rank in (zero, one):
        assert all(x == ABSENT or 0.9 < x <= 1 for row in rank["changed"] for x in row)


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_batch_on_one_rank(results, kind, lag):
    refused = [step == BAD for step in range(STEPS)]
    zero, one = results[kind, lag]
    assert zero["incidents"] == one["incidents"] == [[BAD, 1]]
    assert zero["actions"] == one["actions"] == refused
    assert zero["finite"] == [True] * STEPS, "its own activations were fine"
    assert one["finite"] == [not bad for bad in refused]
    assert zero["changed"] == one["changed"] == refused
    assert zero["forecasts"] == one["forecasts"] == 0
