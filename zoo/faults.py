"""Thousands of seeded random faults against the guard: is any missed, does any reach the weights, is a healthy step ever refused?

python -m zoo.faults --faults 2400

A run trains a small model for 70 steps; after a warm-up, about one step in five carries one fault. Runs differ in model,
optimizer, lag, clipping and way of use. Faults are values (NaN, +Inf, -Inf, 1e30, an fp16 overflow, a flipped bit) put into
places (a batch, an activation, the loss, a gradient, one rank's share of these). Spikes are refused here
(`Policy(on_spike="skip")`), so that a finite fault as large as 1e30 counts as reached if it gets through.

The truth comes from an oracle that shares nothing with the guard: the step is computed a second time on a copy of the model and
every element of loss, gradients and buffers is looked at in float64; the state of model and optimizer is compared before and
after, or with a twin that never saw the refused batches.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import math
import random
import statistics
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanproof
from zoo.two_ranks import two_ranks

VALUES = ("nan", "+inf", "-inf", "1e30", "fp16 overflow", "flipped bit")
PLACES = ("batch", "activation", "loss", "gradient")
STEPS, WARMUP = 70, 24


@dataclass(frozen=True)
class Fault:
    value: str
    place: str
    where: int
    """Which element, module or parameter, modulo how many there are."""
    bit: int
    """Which bit is flipped: the upper part of the fraction, the exponent or the sign."""

    def apply(self, x: Tensor) -> Tensor:
        """The tensor with one element spoiled."""
        flat = x.reshape(-1)
        i = self.where % flat.numel()
        old = flat[i].detach()
        if self.value == "flipped bit":
            new = _flip(float(old), self.bit)
        elif self.value == "fp16 overflow":
            new = float((old.double().abs() * 1e4 + 7e4).to(torch.float16))
        else:
            new = float(self.value)
        index = torch.arange(flat.numel()) == i
        return torch.where(index, torch.tensor(new, dtype=x.dtype), flat).reshape(x.shape)


def _flip(x: float, bit: int) -> float:
    [bits] = struct.unpack("<I", struct.pack("<f", x))
    [y] = struct.unpack("<f", struct.pack("<I", bits ^ (1 << bit)))
    return y


@dataclass
class Batch:
    x: Tensor
    y: Tensor
    fault: Fault | None = None


class Tiny(nn.Module):
    """A transformer block over a sequence of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x.view(len(x), 4, 4)))).mean(1)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 1)),
    "batch norm": lambda: nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.ReLU(), nn.Linear(32, 1)),
    "transformer": Tiny,
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW fused": lambda ps: torch.optim.AdamW(ps, lr=1e-3, fused=True),
    "SGD fused": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, fused=True),
    "AdamW foreach": lambda ps: torch.optim.AdamW(ps, lr=1e-3, foreach=True),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=1e-3),
}


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Mean squared error, with the batch's fault put where it belongs. The same call gives the same fault again."""
    fault, handles = batch.fault, []
    x = fault.apply(batch.x) if fault and fault.place == "batch" else batch.x
    if fault and fault.place == "activation":
        # The output projection of attention is called as a function: a hook on it would never fire.
        modules = [m for n, m in model.named_modules() if isinstance(m, (nn.Linear, nn.LayerNorm)) and "out_proj" not in n]
        module = modules[fault.where % len(modules)]
        handles.append(module.register_forward_hook(lambda _m, _i, out: fault.apply(out)))
    loss = F.mse_loss(model(x).squeeze(-1), batch.y)
    for handle in handles:
        handle.remove()
    if fault and fault.place == "loss":
        # Added, not multiplied: an infinite loss whose gradients are all finite.
        loss = loss + (fault.apply(loss.detach()) - loss.detach())
    if fault and fault.place == "gradient":
        parameters = [p for p in model.parameters() if p.requires_grad]
        p = parameters[fault.where % len(parameters)]
        handle = p.register_hook(lambda g: (handle.remove(), fault.apply(g))[1])
    return loss


@dataclass
class Tally:
    injected: int = 0
    caught: int = 0
    harmless: int = 0
    """Accepted, and rightly: loss, gradients, norm and buffers are finite and of usual size."""
    reached: int = 0
    false_alarms: int = 0
    healthy: int = 0
    hangs: int = 0
    by_fault: Counter[str] = field(default_factory=Counter)
    harmless_by_fault: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        plain = {name: value for name, value in vars(self).items() if not isinstance(value, Counter)}
        return {
            **plain,
            "by_fault": dict(sorted(self.by_fault.items())),
            "harmless_by_fault": dict(sorted(self.harmless_by_fault.items())),
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Tally:
        return cls(**{name: Counter(value) if isinstance(value, dict) else value for name, value in data.items()})

    def add(self, other: Tally) -> None:
        for name in ("injected", "caught", "harmless", "reached", "false_alarms", "healthy", "hangs"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.by_fault.update(other.by_fault)
        self.harmless_by_fault.update(other.harmless_by_fault)
        self.problems += other.problems


@dataclass(frozen=True)
class Truth:
    """What an element-by-element look at one step says."""

    finite: bool
    norm: float


def look(model: nn.Module, batch: Batch) -> Truth:
    """The slow, obvious oracle: forward and backward on a copy, and every number looked at in float64."""
    twin = copy.deepcopy(model)
    random_state = torch.get_rng_state()
    twin.zero_grad()
    loss = loss_fn(twin, batch)
    loss.backward()
    torch.set_rng_state(random_state)
    gradients = [p.grad.double() for p in twin.parameters() if p.grad is not None]
    tensors = [loss.detach().double(), *gradients, *(b.double() for b in twin.buffers())]
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradients))
    single = torch.stack([g.float().norm() for g in gradients]).norm()
    return Truth(all(bool(torch.isfinite(t).all()) for t in tensors) and bool(torch.isfinite(single)), norm)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    moments = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers(), *moments)]


def make_faults(rng: random.Random, count: int, places: tuple[str, ...] = PLACES) -> list[Fault | None]:
    steps: list[Fault | None] = [None] * STEPS
    for step in rng.sample(range(WARMUP, STEPS - 5), count):
        steps[step] = Fault(rng.choice(VALUES), rng.choice(places), rng.randrange(1 << 20), rng.randrange(20, 32))
    return steps


def data(rng: random.Random, faults: list[Fault | None]) -> list[Batch]:
    g = torch.Generator().manual_seed(rng.randrange(1 << 30))
    w = torch.randn(16, generator=g)
    batches = []
    for fault in faults:
        x = torch.randn(16, 16, generator=g)
        batches.append(Batch(x, x @ w / 4 + 0.1 * torch.randn(16, generator=g), fault))
    return batches


def run(seed: int, faults: int = 8) -> Tally:
    """One training with random faults: `guard.step` with the oracle beside each step, or `train_step` against a twin that never
    saw the refused batches."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = MODELS[rng.choice(list(MODELS))]()
    optimizer = OPTIMIZERS[rng.choice(list(OPTIMIZERS))](model.parameters())
    lag = rng.choice((0, 2))
    whole = rng.random() < 0.5
    max_norm = rng.choice((1.0, None, "auto"))
    policy = nanproof.Policy(on_spike="skip", lag=lag, max_consecutive_skips=100, max_skip_rate=1.0)
    batches = data(rng, make_faults(rng, faults))
    start = copy.deepcopy((model, optimizer.state_dict(), torch.get_rng_state()))
    guard = nanproof.Guard(model, optimizer, loss_fn=loss_fn, max_norm=max_norm, policy=policy)
    truths: list[Truth | None] = []
    unchanged: list[bool] = []
    for batch in batches:
        if whole:
            guard.train_step(batch)
            continue
        truths.append(look(model, batch))
        before = state_of(model, optimizer)
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        guard.step(loss)
        after = state_of(model, optimizer)
        unchanged.append(all(torch.equal(a, b) for a, b in zip(before, after, strict=False)) and len(before) == len(after))
    guard.close()
    tally = Tally()
    name = f"seed {seed} {type(model).__name__} {type(optimizer).__name__} lag {lag} {'train_step' if whole else 'step'}"
    refused = [r.action == "skipped" for r in guard.history]
    usual = statistics.median(r.grad_norm for r in guard.history if r.action != "skipped")
    alarms = {i.step for i in guard.incidents}
    for i, batch in enumerate(batches):
        record, truth = guard.history[i], truths[i] if truths else None
        if batch.fault is None:
            tally.healthy += 1
            if refused[i] or i in alarms:
                tally.false_alarms += 1
                tally.problems.append(f"{name}: false alarm at step {i}: {[str(x) for x in guard.incidents if x.step == i]}")
            continue
        tally.injected += 1
        tally.by_fault[f"{batch.fault.place}: {batch.fault.value}"] += 1
        if refused[i]:
            caught = i in alarms and (not unchanged or unchanged[i])
            tally.caught += caught
            if not caught:
                tally.reached += 1
                tally.problems.append(f"{name}: refused step {i} left a trace or no incident: {batch.fault}")
        else:
            sound = math.isfinite(record.loss) and record.grad_norm < 1e3 * usual and (truth is None or truth.finite)
            tally.harmless += sound
            tally.harmless_by_fault[f"{batch.fault.place}: {batch.fault.value}"] += sound
            if not sound:
                tally.reached += 1
                tally.problems.append(f"{name}: accepted step {i}: {batch.fault} {record.loss} {record.grad_norm} {truth}")
    if whole:
        _compare_with_never_seen(name, tally, guard, start, batches, refused)
    if not all(bool(torch.isfinite(t).all()) for t in state_of(model, optimizer)):
        tally.reached += 1
        tally.problems.append(f"{name}: non-finite state at the end")
    return tally


def _compare_with_never_seen(
    name: str, tally: Tally, guard: nanproof.Guard, start: Any, batches: list[Batch], refused: list[bool]
) -> None:
    """Train a twin from the same start over the accepted batches alone, with the oracle beside the faulty ones among them. It
    must end where the guarded run ended, bit for bit."""
    model, optimizer_state, random_state = start
    optimizer = type(guard.optimizer)(model.parameters())
    optimizer.load_state_dict(optimizer_state)
    if optimizer.param_groups[0].get("fused"):
        optimizer._step_supports_amp_scaling = True
    torch.set_rng_state(random_state)
    twin = nanproof.Guard(model, optimizer, loss_fn=loss_fn, max_norm=guard.parts.stepper.max_norm, policy=guard.policy)
    for i, batch in enumerate(batches):
        if refused[i]:
            continue
        if batch.fault is not None and not look(model, batch).finite:
            tally.reached += 1
            tally.problems.append(f"{name}: accepted step {i}, which is not finite: {batch.fault}")
        twin.train_step(batch)
    twin.close()
    pairs = zip(state_of(guard.model, guard.optimizer), state_of(model, optimizer), strict=True)
    if not all(torch.equal(a, b) for a, b in pairs):
        tally.reached += 1
        tally.problems.append(f"{name}: not the run that never saw the refused batches")


def ranks_job(rank: int, seed: int, kind: str, runs: int, faults: int) -> dict[str, Any]:
    """Faults in one rank's batch, loss or gradient under DDP or FSDP2; called on both ranks."""
    from torch.distributed.fsdp import fully_shard

    logging.disable()
    total = Tally()
    decisions = []
    for k in range(runs):
        rng = random.Random(f"{seed}-{k}")
        torch.manual_seed(seed + k)
        model: nn.Module = MODELS["mlp"]()
        guilty = rng.randrange(2)
        steps = make_faults(
            rng, faults, ("batch", "activation", "loss", "gradient") if kind == "ddp" else ("batch", "activation", "loss")
        )
        mine = [fault if rank == guilty else None for fault in steps]
        batches = data(random.Random(f"{seed}-{k}-{rank}"), mine)
        if kind == "ddp":
            inner = model
            model = nn.parallel.DistributedDataParallel(model)
        else:
            fully_shard(model)
            inner = model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        policy = nanproof.Policy(on_spike="skip", lag=rng.choice((0, 2)), max_consecutive_skips=100, max_skip_rate=1.0)
        with nanproof.Guard(model, optimizer, loss_fn=loss_fn, policy=policy) as guard:
            for batch in batches:
                guard.train_step(batch)
        usual = statistics.median(r.grad_norm for r in guard.history if r.action != "skipped")
        alarms = {i.step: i for i in guard.incidents}
        for i, fault in enumerate(steps):
            refused = guard.history[i].action == "skipped"
            if fault is None:
                total.healthy += 1
                total.false_alarms += refused or i in alarms
                continue
            total.injected += 1
            total.by_fault[f"one rank's {fault.place}: {fault.value}"] += 1
            if refused:
                total.caught += 1
                if alarms[i].kind != "spike" and alarms[i].rank not in (guilty, None):
                    total.problems.append(f"{kind} seed {seed}-{k}: step {i} blames rank {alarms[i].rank}, not {guilty}: {fault}")
            elif guard.history[i].grad_norm < 1e3 * usual:
                total.harmless += 1
                total.harmless_by_fault[f"one rank's {fault.place}: {fault.value}"] += 1
            else:
                total.reached += 1
                total.problems.append(f"{kind} seed {seed}-{k}: accepted step {i}: {fault}")
        local = [p.to_local() if hasattr(p, "to_local") else p for p in inner.parameters()]
        if not all(bool(torch.isfinite(p).all()) for p in local):
            total.reached += 1
        whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in inner.parameters()]
        checksum = sum(float(p.detach().double().sum()) for p in whole)
        decisions.append([[r.action for r in guard.history], checksum])
    return {"tally": total.as_json(), "decisions": decisions}


def on_ranks(seed: int, kind: str, runs: int, faults: int = 8) -> Tally:
    """A campaign on two ranks; a hang is gloo's time-out."""
    tally = Tally()
    try:
        [(zero, one)] = two_ranks(("zoo.faults:ranks_job", (seed, kind, runs, faults), {}), timeout=60)
    except Exception as error:
        tally.hangs += "imed out" in str(error)
        tally.problems.append(f"{kind} seed {seed}: {error!r}"[:400])
        return tally
    if zero["decisions"] != one["decisions"]:
        tally.reached += 1
        tally.problems.append(f"{kind} seed {seed}: the ranks decided differently")
    tally.add(Tally.from_json(zero["tally"]))
    return tally


def campaign(faults: int, seed: int = 0, progress: bool = False) -> Tally:
    logging.disable()
    torch.set_num_threads(1)
    total = Tally()
    ranked, each = faults // 6, 8
    for kind in ("ddp", "fsdp2"):
        total.add(on_ranks(seed, kind, max(1, ranked // 2 // each)))
        if progress:
            print(f"{kind}: {total.injected} faults", file=sys.stderr)
    while total.injected < faults:
        total.add(run(seed))
        seed += 1
        if progress and seed % 40 == 0:
            print(f"{total.injected} of {faults} faults", file=sys.stderr)
    logging.disable(logging.NOTSET)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the tally there too")
    args = parser.parse_args()
    start = time.perf_counter()
    total = campaign(args.faults, args.seed, progress=True)
    for problem in total.problems:
        print(problem, file=sys.stderr)
    print("                                   injected  harmless")
    for name, count in sorted(total.by_fault.items()):
        print(f"  {name:34s} {count:7d} {total.harmless_by_fault[name]:9d}")
    print(f"injected                             {total.injected:5d}")
    print(f"caught                               {total.caught:5d}")
    print(f"harmless, rightly accepted           {total.harmless:5d}")
    print(f"reached the weights                  {total.reached:5d}")
    print(f"false alarms on {total.healthy} healthy steps   {total.false_alarms:5d}")
    print(f"hangs                                {total.hangs:5d}")
    print(f"({time.perf_counter() - start:.0f} s)")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(total.as_json(), file, indent=1)
    raise SystemExit(1 if total.reached or total.false_alarms or total.hangs or total.problems else 0)


if __name__ == "__main__":
    main()
