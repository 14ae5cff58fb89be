"""Two ranks (gloo): they decide alike, end alike, never hang, add no collective, and the guilty one is named."""

from __future__ import annotations

import functools
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import nanproof
from toys import batches, mse, poison
from zoo.two_ranks import two_ranks

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


def half_on_one_rank(rank: int, fused: bool):
    """fp16 FSDP2 weights; the step overflows in a row that only rank 1 holds."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False).half()
    with torch.no_grad():
        model.weight[3] = 6.5e4
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2000.0, weight_decay=0.0, fused=fused, foreach=not fused)
    guard = nanproof.Guard(model, optimizer, loss_fn=lambda m, x: -m(x).float().sum() * 500, max_norm=None)
    for _ in range(3):
        guard.train_step(torch.ones(2, 4).half() * 1e-3)
    guard.close()
    return [[i.step, i.kind, i.action] for i in guard.incidents]


def parameters_beside_ddp(rank: int):
    """A loss with a parameter of its own, which nobody reduces; its gradient is infinite on rank 1 at step 2."""
    model, _ = build("ddp")
    own = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.AdamW([*model.parameters(), own], lr=1e-2)
    guard = nanproof.Guard(model, optimizer, loss_fn=lambda m, b: mse(m, b) + (own * b[2]).abs().sqrt())
    for i, batch in enumerate(batches(5, seed=rank + 1)):
        guard.train_step([*batch, 0.0 if rank == 1 and i == 2 else 1.0])
    guard.close()
    return [r.action == "skipped" for r in guard.history], bool(torch.isfinite(own))


def gives_up_a_micro_batch(rank: int):
    """FSDP2, two micro-batches; the second raises, after the first has been accumulated. The next step must not have it."""
    ends = []
    for disturbed in (True, False):
        model, optimizer = build("fsdp2")

        def loss_fn(model, batch):
            if len(batch) > 2:
                raise ValueError("this batch is broken")
            return mse(model, batch)

        data = batches(8, seed=rank + 1)
        with nanproof.Guard(model, optimizer, loss_fn=loss_fn) as guard:
            for i in range(0, 8, 2):
                if i == 2:
                    with suppress(ValueError):
                        if disturbed:
                            guard.train_step([data[2][0] * 1e3, data[2][1]], [*data[3], True])
                    continue
                guard.train_step(data[i], data[i + 1])
        ends.append(torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()]))
    return torch.equal(*ends)


def buffer_in_a_loop_of_ones_own(rank: int):
    """Plain backward: this rank's bad buffer cannot refuse the step, but its finite values stay and it is told."""
    model, optimizer = build("ddp", batch_norm=True)
    data = batches(6, seed=rank + 1)
    if rank == 0:
        data[3] = poison(data[3], 1e25)
    with nanproof.Guard(model, optimizer) as guard:
        for batch in data:
            optimizer.zero_grad()
            loss = mse(model, batch)
            loss.backward()
            guard.step(loss)
    return [[i.step, i.kind, i.action] for i in guard.incidents], all(bool(torch.isfinite(b).all()) for b in model.buffers())


def second_of_a_kind(rank: int, kind: str):
    """A NaN batch on rank 0, later an Inf loss on rank 1, and then the NaN batch again: three bad losses, two faults."""
    model, optimizer = build(kind)
    data = batches(STEPS, seed=rank + 1)
    with nanproof.Guard(model, optimizer, loss_fn=loss_fault) as guard:
        for i, batch in enumerate(data):
            bad = poison(batch) if i in (2, 8) and rank == 0 else [*batch, True] if i == 5 and rank == 1 else batch
            guard.train_step(bad)
    found = [(i.diagnosis and (i.diagnosis.cause, i.diagnosis.rank)) for i in guard.incidents]
    return [[i.step, i.kind, i.rank, i.same_as, told] for i, told in zip(guard.incidents, found, strict=True)]


def leaves_at_once(rank: int):
    """Rank 0's own code raises while a refused step is under way: it must not wait for rank 1."""
    import time

    model, optimizer = build("ddp")
    data = batches(5, seed=rank + 1)
    data[3] = poison(data[3])
    start = time.monotonic()
    try:
        with nanproof.Guard(model, optimizer, loss_fn=mse, policy=nanproof.Policy(lag=2)) as guard:
            for batch in data[:4]:
                guard.train_step(batch)
            start = time.monotonic()
            raise RuntimeError("this rank's data is broken")
    except RuntimeError:
        return time.monotonic() - start


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


def test_a_second_bad_loss_on_another_rank_is_diagnosed_there():
    """The same kind, another rank: the first diagnosis does not stand for it. The same fault again does."""
    [(zero, one)] = two_ranks(("test_ranks:second_of_a_kind", ("ddp",), {}))
    assert zero == one
    assert [incident[:4] for incident in zero] == [
        [2, "nonfinite-loss", 0, None],
        [5, "nonfinite-loss", 1, None],
        [8, "nonfinite-loss", 0, 2],
    ]
    assert [incident[4] for incident in zero] == [["one-rank-nonfinite", 0], ["one-rank-nonfinite", 1], None]


def test_no_collective_is_added_on_the_healthy_path():
    """As many as clip_grad_norm_ does; one a step under FSDP2 without clipping, where a NaN in one shard would stay hidden."""
    jobs = [("test_ranks:collectives", (kind, max_norm), {}) for kind in ("ddp", "fsdp2") for max_norm in (1.0, None)]
    for (_, (kind, max_norm), _), (zero, one) in zip(jobs, two_ranks(*jobs), strict=True):
        assert zero == one
        added = 5 if kind == "fsdp2" and max_norm is None else 0
        assert zero["True"] - zero["False"] == added, (kind, max_norm, zero)
        assert zero["False"] > 0


def test_values_of_one_rank_alone_never_decide():
    half = [("test_ranks:half_on_one_rank", (fused,), {}) for fused in (True, False)]
    rest = ("gives_up_a_micro_batch", "parameters_beside_ddp", "buffer_in_a_loop_of_ones_own")
    *halves, given_up, beside, buffer = two_ranks(*half, *((f"test_ranks:{name}", (), {}) for name in rest), timeout=30)
    assert given_up == (True, True)
    for zero, one in halves:
        assert zero == one and zero[0][:2] == [0, "nonfinite-weight"]
    assert beside == ([[False, False, True, False, False], True],) * 2
    (told, finite), (other, other_finite) = buffer
    assert told == [[3, "nonfinite-weight", "recorded"]] and other == [] and finite and other_finite


def test_a_rank_that_fails_by_itself_leaves_at_once():
    [(zero, one)] = two_ranks(("test_ranks:leaves_at_once", (), {}), timeout=30)
    assert max(zero, one) < 10
