"""Two ranks (gloo): they decide alike, end alike, never hang, add no collective, and the guilty one is named."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import nanproof
from toys import batches, mse, poison
from two_ranks import two_ranks

STEPS = 10
BAD = 4


def build(kind: str, optimizer: str = "AdamW", batch_norm: bool = False):
    torch.manual_seed(0)
    norm = nn.BatchNorm1d(16) if batch_norm else nn.LayerNorm(16)
    model = nn.Sequential(nn.Linear(6, 16), norm, nn.Dropout(0.1), nn.ReLU(), nn.Linear(16, 1))
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp2":
        fully_shard(model[0])
        fully_shard(model)
    make = {"AdamW": torch.optim.AdamW, "SGD": functools.partial(torch.optim.SGD, momentum=0.9)}[optimizer]
    return model, make(model.parameters(), lr=1e-2)


def gradient_fault(model, batch):
    """Finite loss; the gradient of an activation is NaN on its way back."""
    out = model(batch[0]).squeeze(-1)
    if len(batch) > 2:
        out.register_hook(lambda g: g * float("nan"))
    return torch.nn.functional.mse_loss(out, batch[1])


def loss_fault(model, batch):
    """Inf loss; every gradient finite."""
    loss = mse(model, batch)
    return loss + float("inf") if len(batch) > 2 else loss


def scenario(rank: int, kind: str, fault: str, lag: int, *, max_norm=1.0, accumulation=1, optimizer="AdamW", scaler=False):
    """Train twice: over one bad batch on rank 1, and over the same data without it. Returns what the test looks at."""
    results = []
    for saw_bad in (True, False):
        model, opt = build(kind, optimizer, batch_norm=fault == "buffer")
        grad_scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8) if scaler else None
        loss_fn = {"gradient": gradient_fault, "loss": loss_fault}.get(fault, mse)
        data = batches(STEPS * accumulation, seed=rank + 1)
        with nanproof.Guard(
            model, opt, loss_fn=loss_fn, max_norm=max_norm, scaler=grad_scaler, policy=nanproof.Policy(lag=lag)
        ) as guard:
            for i in range(STEPS):
                micro = data[i * accumulation : (i + 1) * accumulation]
                if i == BAD:
                    if not saw_bad:
                        continue
                    if rank == 1:
                        bad = {"batch": poison(micro[0]), "buffer": poison(micro[0], 1e25)}.get(fault, [*micro[0], True])
                        micro = [bad, *micro[1:]]
                guard.train_step(*micro)
        parameters = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
        results.append((guard, torch.cat([p.detach().reshape(-1) for p in parameters])))
    (guard, weights), (oracle_guard, oracle) = results
    return {
        "path": guard.path,
        "incidents": [[i.step, i.kind, i.rank, i.micro_batch] for i in guard.incidents],
        "oracle_incidents": len(oracle_guard.incidents),
        "actions": [r.action for r in guard.history],
        "as_never_seen": torch.equal(weights, oracle),
        "finite": bool(torch.isfinite(weights).all()),
        "weights": weights.tolist(),
    }


def sequence_number() -> int:
    """How many collectives this process has entered, in all its groups."""
    return sum(group._get_sequence_number_for_group() for group in dist.distributed_c10d._world.pg_map)


def collectives(rank: int, kind: str, max_norm: float | None):
    """Collectives of five healthy steps: plain clip_grad_norm_ + step, and guarded."""
    counts = {}
    for guarded in (False, True):
        model, opt = build(kind)
        data = batches(6, seed=rank + 1)
        guard = nanproof.Guard(model, opt, max_norm=max_norm) if guarded else None

        def one(batch, model=model, opt=opt, guard=guard):
            opt.zero_grad()
            loss = mse(model, batch)
            if guard:
                guard.backward(loss)
                guard.step()
            else:
                loss.backward()
                if max_norm:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
                opt.step()

        one(data[0])
        before = sequence_number()
        for batch in data[1:]:
            one(batch)
        counts[str(guarded)] = sequence_number() - before
        if guard:
            guard.close()
    return counts


CASES = {
    "batch": ("nonfinite-loss", {}),
    "loss": ("nonfinite-loss", {}),
    "gradient": ("nonfinite-gradient", {}),
    "buffer": ("nonfinite-weight", {}),
}


@pytest.mark.parametrize("kind", ["ddp", "fsdp2"])
def test_one_bad_rank_is_refused_by_all_and_named(kind):
    """Bad batch, Inf loss with finite gradients, bad gradient, on rank 1 only; at lag 0 and 2, clipped or not, accumulated."""
    faults = [f for f in CASES if not (kind == "fsdp2" and f == "buffer")]
    jobs = [("test_ranks:scenario", (kind, fault, lag), {}) for fault in faults for lag in (0, 2)]
    jobs += [("test_ranks:scenario", (kind, fault, 2), {"max_norm": None}) for fault in ("batch", "loss")]
    jobs += [("test_ranks:scenario", (kind, fault, 0), {"accumulation": 2}) for fault in ("batch", "loss")]
    jobs += [
        ("test_ranks:scenario", (kind, "batch", 0), {"optimizer": "SGD"}),
        ("test_ranks:scenario", (kind, "batch", 2), {"scaler": True}),
    ]
    for (_, (_, fault, lag), kwargs), (zero, one) in zip(jobs, two_ranks(*jobs), strict=True):
        where = (fault, lag, kwargs)
        assert zero["incidents"] == one["incidents"], where
        assert zero["actions"] == one["actions"], where
        assert zero["weights"] == one["weights"], where
        assert zero["finite"] and zero["as_never_seen"], where
        assert zero["oracle_incidents"] == 0, where
        [[step, what, rank, micro]] = zero["incidents"]
        assert (step, what) == (BAD, CASES[fault][0]), where
        assert rank == 1, where
        assert micro == (0 if kwargs.get("accumulation") else None), where


def test_no_collective_is_added_on_the_healthy_path():
    """As many as clip_grad_norm_ does; one a step under FSDP2 without clipping, where a NaN in one shard would stay hidden."""
    jobs = [("test_ranks:collectives", (kind, max_norm), {}) for kind in ("ddp", "fsdp2") for max_norm in (1.0, None)]
    for (_, (kind, max_norm), _), (zero, one) in zip(jobs, two_ranks(*jobs), strict=True):
        assert zero == one
        added = 5 if kind == "fsdp2" and max_norm is None else 0
        assert zero["True"] - zero["False"] == added, (kind, max_norm, zero)
        assert zero["False"] > 0
