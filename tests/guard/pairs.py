"""Two towers, one optimizer each: every kind of optimizer the pairs are made of, and the whole state of a run over them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, StepLR

from toys import Lion

RATE = 2.0**-7
"""A power of two: a rate scaled by hand and one scaled by the guard are the same number."""

TOWERS = ("first", "second")


class Container(torch.optim.Optimizer):
    """Torchtitan's shape: a list of optimizers, and a base class whose own groups have no rate and whose state stays empty."""

    def __init__(self, optimizers):
        self.optimizers = optimizers
        super().__init__([p for o in optimizers for group in o.param_groups for p in group["params"]], {})

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def state_dict(self):
        return {"optimizers": [optimizer.state_dict() for optimizer in self.optimizers]}

    def load_state_dict(self, state_dict):
        for optimizer, state in zip(self.optimizers, state_dict["optimizers"], strict=True):
            optimizer.load_state_dict(state)


class MuonAdamW(torch.optim.Optimizer):
    """Muon over matrices and AdamW over the rest, as two attributes; their groups are also its own."""

    def __init__(self, params, lr):
        params = list(params)
        self.muon = torch.optim.Muon([p for p in params if p.ndim == 2], lr=lr)
        self.adamw = torch.optim.AdamW([p for p in params if p.ndim != 2], lr=lr)
        super().__init__(params, {})
        self.param_groups = self.muon.param_groups + self.adamw.param_groups

    def step(self, closure=None):
        self.muon.step()
        self.adamw.step()


class OwnKeys(torch.optim.Optimizer):
    """Momentum for matrices and two moments for the rest, all in `self.state`, under keys that differ between the groups."""

    def __init__(self, params, lr):
        params = list(params)
        matrices, others = [p for p in params if p.ndim == 2], [p for p in params if p.ndim != 2]
        super().__init__([{"params": matrices, "matrices": True}, {"params": others, "matrices": False}], {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if group["matrices"]:
                    momentum = state.setdefault("momentum", torch.zeros_like(p))
                    momentum.mul_(0.9).add_(p.grad)
                    p.sub_(group["lr"] * momentum / (momentum.norm() + 1e-8))
                    continue
                state["count"] = state.get("count", 0) + 1
                first, second = (state.setdefault(key, torch.zeros_like(p)) for key in ("mean", "square"))
                first.lerp_(p.grad, 0.1)
                second.lerp_(p.grad.square(), 0.01)
                correction = 1 - 0.99 ** state["count"]
                p.sub_(group["lr"] * first / ((second / correction).sqrt() + 1e-8))


class Lookahead(torch.optim.Optimizer):
    """Wraps another optimizer and shares its groups. Slow weights are in its own state, the counter is in the groups."""

    def __init__(self, inner, k=3, alpha=0.5):
        self.inner, self.k, self.alpha = inner, k, alpha
        super().__init__([p for group in inner.param_groups for p in group["params"]], {})
        self.param_groups = inner.param_groups
        for group in self.param_groups:
            group["taken"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if "slow" not in self.state[p]:
                    self.state[p]["slow"] = p.detach().clone()
        self.inner.step()
        for group in self.param_groups:
            group["taken"] += 1
            for p in group["params"] if group["taken"] % self.k == 0 else ():
                slow = self.state[p]["slow"]
                slow.lerp_(p, self.alpha)
                p.copy_(slow)


class Duck:
    """Not a torch optimizer: groups and state are those of the optimizers inside, put together on every read."""

    def __init__(self, optimizers):
        self.optimizers = optimizers

    @property
    def param_groups(self):
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self):
        return {p: state for optimizer in self.optimizers for p, state in optimizer.state.items()}

    def step(self):
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none=True):
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


def halves(params: list[Tensor]) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(params[:2], lr=RATE), torch.optim.SGD(params[2:], lr=RATE, momentum=0.9)]


KINDS: dict[str, Callable[[list[Tensor]], Any]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=RATE),
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=RATE, foreach=True),
    "SGD": lambda ps: torch.optim.SGD(ps, lr=RATE, momentum=0.9),
    "Muon": lambda ps: torch.optim.Muon(ps, lr=RATE),
    "RMSprop": lambda ps: torch.optim.RMSprop(ps, lr=RATE),
    "Adagrad": lambda ps: torch.optim.Adagrad(ps, lr=RATE),
    "Lion": lambda ps: Lion(ps, lr=RATE / 4),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=RATE),
    "Adafactor": lambda ps: torch.optim.Adafactor(ps, lr=RATE),
    "Container": lambda ps: Container(halves(ps)),
    "MuonAdamW": lambda ps: MuonAdamW(ps, lr=RATE),
    "OwnKeys": lambda ps: OwnKeys(ps, lr=RATE),
    "Lookahead": lambda ps: Lookahead(torch.optim.AdamW(ps, lr=RATE)),
    "Duck": lambda ps: Duck(halves(ps)),
}
NAMES = tuple(KINDS)
PAIRS = [f"{a}+{NAMES[(i + shift) % len(NAMES)]}" for shift in range(len(NAMES) // 2 + 1) for i, a in enumerate(NAMES)]
"""Every two kinds, in one order or the other. 14 neighbours have every kind on both sides, so a thin part covers all kinds."""


def tower(kind: str, dropout: float) -> nn.Sequential:
    bias = kind != "Muon"  # Muon takes matrices only
    norm = nn.BatchNorm1d(8, affine=False)
    return nn.Sequential(nn.Linear(6, 8, bias=bias), nn.Tanh(), norm, nn.Dropout(dropout), nn.Linear(8, 1, bias=bias))


class Towers(nn.Module):
    """Two models side by side: no gradient of one depends on the other."""

    def __init__(self, pair: str, dropout: float = 0.0):
        super().__init__()
        first, second = pair.split("+")
        self.first, self.second = tower(first, dropout), tower(second, dropout)

    def forward(self, x):
        return self.first(x), self.second(x)


def loss_fn(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Return the sum of the towers' losses. A reach of 0 makes the gradient of that tower NaN; the loss stays finite."""
    x, y, reach = batch
    terms = [F.mse_loss(out.squeeze(-1), y) + (out * r).square().sum().sqrt() for out, r in zip(model(x), reach, strict=True)]
    return terms[0] + terms[1]


def step_batches(count: int, micro: int = 1, seed: int = 1) -> list[list[list[Tensor]]]:
    """Return the micro-batches of each step."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(6, generator=g)
    steps = []
    for _ in range(count):
        xs = [torch.randn(8, 6, generator=g) for _ in range(micro)]
        steps.append([[x, x @ w, torch.ones(2)] for x in xs])
    return steps


def unreachable(batch: list[Tensor], place: str) -> list[Tensor]:
    """Return the batch with a NaN gradient in one tower."""
    reach = torch.ones(2)
    reach[TOWERS.index(place)] = 0.0
    return [batch[0], batch[1], reach]


def build(pair: str, model: Towers) -> list[Any]:
    return [KINDS[kind](list(getattr(model, place).parameters())) for kind, place in zip(pair.split("+"), TOWERS, strict=True)]


def inside(optimizer: Any) -> Iterator[Any]:
    """Yield an optimizer and all that it contains."""
    yield optimizer
    nested = [getattr(optimizer, name) for name in ("muon", "adamw", "inner") if hasattr(optimizer, name)]
    for inner in (*getattr(optimizer, "optimizers", ()), *nested):
        yield from inside(inner)


def rated(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Return the optimizers a scheduler can be made for: torch's own, with a rate in every group."""
    if isinstance(optimizer, torch.optim.Optimizer) and all("lr" in group for group in optimizer.param_groups):
        return [optimizer]
    return optimizer.optimizers


def rate_groups(optimizers: list[Any]) -> list[dict[str, Any]]:
    """Return every group with a rate, once."""
    groups = [group for outer in optimizers for o in inside(outer) for group in o.param_groups if "lr" in group]
    return list({id(group): group for group in groups}.values())


def schedules(kind: str, optimizers: list[Any]) -> list[Any]:
    """Return the schedulers: none, one over the first optimizer, or one kind over each of the two."""
    if kind == "no schedule":
        return []
    first = [LambdaLR(o, lambda step: 1 / (1 + step)) for o in rated(optimizers[0])]
    if kind == "one schedule":
        return first[:1]
    return first + [StepLR(o, 2, gamma=0.5) for o in rated(optimizers[1])]


def whole(model: nn.Module, optimizers: list[Any], schedulers: list[Any]) -> dict[str, Any]:
    """Return a copy of everything: weights, buffers, the state and groups of every optimizer at any depth, schedulers."""
    names = {p: name for name, p in model.named_parameters()}
    return {
        "model": copy.deepcopy(model.state_dict()),
        "optimizers": [[_one(o, names) for o in inside(optimizer)] for optimizer in optimizers],
        "schedulers": [copy.deepcopy(scheduler.state_dict()) for scheduler in schedulers],
    }


def _one(optimizer: Any, names: dict[Tensor, str]) -> dict[str, Any]:
    numbers = {k: v for k, v in vars(optimizer).items() if isinstance(v, int | float | Tensor) and not k.startswith("_")}
    return {
        "state": {names[p]: copy.deepcopy(dict(state)) for p, state in optimizer.state.items()},
        "groups": [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups],
        "numbers": copy.deepcopy(numbers),
    }


@torch.no_grad()
def poison_weight(model: Towers, optimizers: list[Any], place: str) -> None:
    next(getattr(model, place).parameters()).view(-1)[0] = float("nan")


@torch.no_grad()
def poison_moment(model: Towers, optimizers: list[Any], place: str) -> None:
    """Write NaN into the first moment, at any depth, of a parameter of that tower."""
    for p in getattr(model, place).parameters():
        for o in inside(optimizers[TOWERS.index(place)]):
            for value in o.state.get(p, {}).values():
                if isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 1:
                    value.view(-1)[0] = float("nan")
                    return
    raise AssertionError(f"{place}: no optimizer has a moment")


HARMS = {"weight": poison_weight, "moment": poison_moment}
