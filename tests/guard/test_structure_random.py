"""Random sequences of healthy steps, bad steps and changes of structure end where a run without the bad steps ends.

The oracle trains without the bad steps, and makes a fresh guard after every change. Weights, buffers and optimizer state of the
two are compared bit for bit. `max_norm` is a fixed number and spikes are only recorded, so no running statistic matters.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from guard.guarding import INF, NAN
from guard.structures import Loop, Net, samples, spoiled, swap
from toys import differences

QUICK, ALL = 40, 1120
OPTIMIZERS: dict[str, Callable[[list[Tensor]], list[Any]]] = {
    "AdamW-fused": lambda ps: [torch.optim.AdamW(ps, lr=1e-2, fused=True)],
    "AdamW-foreach": lambda ps: [torch.optim.AdamW(ps, lr=1e-2, foreach=True)],
    "SGD-fused": lambda ps: [torch.optim.SGD(ps, lr=1e-2, momentum=0.9, fused=True)],
    "SGD-foreach": lambda ps: [torch.optim.SGD(ps, lr=1e-2, momentum=0.9, foreach=True)],
    "RMSprop": lambda ps: [torch.optim.RMSprop(ps, lr=1e-3, momentum=0.9)],
    "Muon, AdamW": lambda ps: [
        torch.optim.Muon([p for p in ps if p.ndim == 2], lr=1e-3),
        torch.optim.AdamW([p for p in ps if p.ndim != 2], lr=1e-2, fused=True),
    ],
}
LOOPS = [("step", 0), ("train_step", 0), ("train_step", 2)]
"""How the run is trained, and the lag of its verdicts."""


class Affine(nn.Module):
    """A module of one vector, to be appended to a model."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def owner(optimizers: list[Any], p: Tensor) -> Any:
    """Return the optimizer that trains tensors of this shape: Muon takes matrices only."""
    return optimizers[0] if p.ndim == 2 else optimizers[-1]


def swap_everywhere(optimizers: list[Any], old: nn.Module, new: nn.Module) -> None:
    for optimizer in optimizers:
        swap(optimizer, old, new)


def places(optimizers: list[Any]) -> list[tuple[dict[str, Any], int]]:
    """Return the group and the index of every parameter that has company in its group."""
    return [(g, i) for o in optimizers for g in o.param_groups if len(g["params"]) > 1 for i in range(len(g["params"]))]


def join(optimizers: list[Any], module: nn.Module, rng: random.Random) -> None:
    """Train a module's parameters too: in a group that exists, or in a new one."""
    for p in module.parameters():
        optimizer = owner(optimizers, p)
        if rng.random() < 0.5:
            optimizer.param_groups[0]["params"].append(p)
        else:
            optimizer.add_param_group({"params": [p]})


def replace_head(model: Net, optimizers: list[Any], rng: random.Random) -> None:
    old, model.head = model.head, nn.Linear(8, 1)
    swap_everywhere(optimizers, old, model.head)


def add_head(model: Net, optimizers: list[Any], rng: random.Random) -> None:
    """The old head stays in its group and has no gradient any more."""
    model.head = nn.Linear(8, 1)
    join(optimizers, model.head, rng)


def resize_embedding(model: Net, optimizers: list[Any], rng: random.Random) -> None:
    rows = len(model.embed.weight)
    old, model.embed = model.embed, nn.Embedding(rows + rng.randint(1, 4), 6, dtype=model.embed.weight.dtype)
    model.embed.weight.data[:rows] = old.weight.data
    swap_everywhere(optimizers, old, model.embed)


def replace_with_state(model: Net, optimizers: list[Any], rng: random.Random) -> None:
    """A new weight of the body goes on with the moments of the old one."""
    old = model.body.weight
    model.body.weight = model.tied.weight = nn.Parameter(old.detach().clone() + 0.1, requires_grad=old.requires_grad)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [model.body.weight if p is old else p for p in group["params"]]
        if old in optimizer.state:
            optimizer.state[model.body.weight] = optimizer.state.pop(old)


def add_parameter(model: Net, optimizers: list[Any], rng: random.Random) -> None:
    model.extra.append(Affine())
    join(optimizers, model.extra[-1], rng)


def remove_parameter(model: Net, optimizers: list[Any], rng: random.Random) -> None:
    """Take a parameter out of the groups for good; it keeps its value."""
    if found := places(optimizers):
        group, index = rng.choice(found)
        p = group["params"].pop(index).requires_grad_(False)
        p.grad = None
        for optimizer in optimizers:
            optimizer.state.pop(p, None)


def freeze(model: Net, optimizers: list[Any], rng: random.Random) -> None:
    """Freeze a parameter that stays in its group."""
    if found := places(optimizers):
        group, index = rng.choice(found)
        group["params"][index].requires_grad_(False)


def unfreeze(model: Net, optimizers: list[Any], rng: random.Random) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.requires_grad_(True)


def add_buffers(model: Net, optimizers: list[Any], rng: random.Random) -> None:
    model.extra.insert(rng.randint(0, len(model.extra)), norm := nn.BatchNorm1d(8, affine=rng.random() < 0.5))
    join(optimizers, norm, rng)


def split_group(model: Net, optimizers: list[Any], rng: random.Random) -> None:
    """Give a parameter a group of its own, with another rate."""
    if found := places(optimizers):
        group, index = rng.choice(found)
        owner_of_group = next(o for o in optimizers if any(g is group for g in o.param_groups))
        owner_of_group.add_param_group({"params": [group["params"].pop(index)], "lr": group["lr"] / 2})


def change_dtype(model: Net, optimizers: list[Any], rng: random.Random) -> None:
    """Move the embedding or the head to another precision. Torch's fused SGD is wrong for bfloat16 on the CPU."""
    module = rng.choice([model.embed, model.head])
    wrong = isinstance(optimizers[0], torch.optim.SGD) and optimizers[0].param_groups[0]["fused"]
    module.to(rng.choice([torch.float, torch.double] if wrong else [torch.float, torch.double, torch.bfloat16]))
    for optimizer in optimizers:
        for p in module.parameters():
            optimizer.state.pop(p, None)


def replace_groups(model: Net, optimizers: list[Any], rng: random.Random) -> None:
    optimizer = rng.choice(optimizers)
    optimizer.param_groups = [{**group, "params": [*group["params"]]} for group in reversed(optimizer.param_groups)]


CHANGES = {
    f.__name__: f
    for f in (
        replace_head,
        add_head,
        resize_embedding,
        replace_with_state,
        add_parameter,
        remove_parameter,
        freeze,
        unfreeze,
        add_buffers,
        split_group,
        change_dtype,
        replace_groups,
    )
}
FAULTS = ["nan", "inf", "gradient"]


@dataclass
class Plan:
    """What one seed trains: an optimizer, a loop, and what happens in which order."""

    optimizer: str
    loop: str
    lag: int
    diagnose: str
    events: list[str]

    @classmethod
    def of(cls, seed: int) -> Plan:
        rng = random.Random(seed)
        loop, lag = LOOPS[seed % 3]
        optimizer = rng.choice(list(OPTIMIZERS))
        events = ["step"]
        for _ in range(rng.randint(5, 8)):
            kind = rng.choice(["step", "fault", "change", "change"])
            events.append({"step": "step", "fault": rng.choice(FAULTS), "change": rng.choice(list(CHANGES))}[kind])
            if kind == "change" and rng.random() < 0.5:
                events.append(rng.choice(FAULTS))
        return cls(optimizer, loop, lag, "new" if seed % 8 == 0 else "never", [*events, "step", "step"])


def trained(seed: int, plan: Plan, *, faults: bool, fresh: bool) -> dict[str, Any]:
    """Return the state after the sequence: with its bad steps or without, with a fresh guard after each change or not."""
    torch.manual_seed(seed)
    model = Net(nn.BatchNorm1d(8))
    optimizers = OPTIMIZERS[plan.optimizer]([*model.parameters()])
    policy = {"on_spike": "record", "lag": plan.lag, "diagnose": plan.diagnose, "max_skip_rate": 1.0}
    loop = Loop(plan.loop, model, optimizers if len(optimizers) > 1 else optimizers[0], max_norm=0.5, policy=policy)
    data = samples(len(plan.events), seed)
    for i, event in enumerate(plan.events):
        if event in CHANGES:
            loop.guard.sync()
            torch.manual_seed(seed + i)
            CHANGES[event](model, optimizers, random.Random(seed + i))
            if fresh:
                loop.renew()
        elif event == "step":
            loop.step(data[i])
        elif faults:
            loop.step(faulty(data[i], event, model, optimizers, random.Random(seed + i)))
            loop.guard.sync()
            assert loop.guard.history[-1].action == "skipped", f"event {i}, {event}: the step was not refused"
    loop.close()
    if not fresh:
        kept = [r.action != "skipped" for r in loop.guard.history]
        assert kept == [e == "step" for e in plan.events if e not in CHANGES], "a healthy step was refused"
    return loop.state()


def faulty(batch: list[Any], fault: str, model: Net, optimizers: list[Any], rng: random.Random) -> list[Any]:
    """Return the batch with a bad input, or with a trained parameter whose gradient will be NaN."""
    if fault == "gradient":
        trained = {p for o in optimizers for g in o.param_groups for p in g["params"] if p.requires_grad}
        return [*batch, rng.choice([name for name, p in model.named_parameters() if p in trained])]
    return spoiled(batch, NAN if fault == "nan" else INF)


@pytest.mark.parametrize("seed", [pytest.param(s, marks=() if s < QUICK else pytest.mark.slow) for s in range(ALL)])
def test_a_changing_run_ends_where_one_without_bad_steps_ends(seed):
    plan = Plan.of(seed)
    try:
        expected = trained(seed, plan, faults=False, fresh=True)
        found = list(differences("", trained(seed, plan, faults=True, fresh=False), expected))
    except Exception as error:
        raise AssertionError(f"seed {seed}, {plan}: {type(error).__name__}: {error}") from error
    assert not found, f"seed {seed}, {plan}: {found}"
