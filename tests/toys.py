"""Small trainings that the tests share: models, optimizers, batches, and what a run leaves behind."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanproof


class Lion(torch.optim.Optimizer):
    """A hand-made optimizer that knows nothing of `found_inf`."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                m, (b1, b2) = state["momentum"], group["betas"]
                p.add_((m * b1 + p.grad * (1 - b1)).sign(), alpha=-group["lr"])
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


def net(dropout: float = 0.2, batch_norm: bool = True) -> nn.Sequential:
    norm = nn.BatchNorm1d(16) if batch_norm else nn.Identity()
    return nn.Sequential(nn.Linear(6, 16), norm, nn.Dropout(dropout), nn.ReLU(), nn.Linear(16, 1))


def mse(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]).squeeze(-1).float(), batch[1].float())


def mse_fp16(model: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", dtype=torch.float16):
        out = model(batch[0])
    return F.mse_loss(out.squeeze(-1).float(), batch[1])


def batches(count: int, seed: int = 1, size: int = 8, dtype: torch.dtype = torch.float32) -> list[list[Tensor]]:
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(6, generator=g)
    out = []
    for _ in range(count):
        x = torch.randn(size, 6, generator=g)
        out.append([x.to(dtype), (x @ w + 0.1 * torch.randn(size, generator=g)).to(dtype)])
    return out


def poison(batch: list[Tensor], value: float = float("nan")) -> list[Tensor]:
    x = batch[0].clone()
    x[2, 1] = value
    return [x, batch[1]]


OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    f"{cls.__name__}-{how}": lambda ps, cls=cls, kw=kw: cls(
        ps, lr=1e-2, **kw, **({"momentum": 0.9} if cls is torch.optim.SGD else {})
    )
    for cls in (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD)
    for how, kw in {"fused": {"fused": True}, "foreach": {"foreach": True}, "single": {"foreach": False}}.items()
}
OPTIMIZERS["AdamW-default"] = lambda ps: torch.optim.AdamW(ps, lr=1e-2)
OPTIMIZERS["Lion"] = lambda ps: Lion(ps, lr=1e-3)


@dataclass
class Run:
    """A finished run and everything a bad batch could have left a trace in."""

    guard: nanproof.Guard
    state: dict[str, Any]

    def same_as(self, other: Run) -> list[str]:
        """What differs, in names; empty when the two runs are bit-identical."""
        return list(differences("", self.state, other.state))


def differences(name: str, a: Any, b: Any) -> Iterable[str]:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.dtype != b.dtype or not torch.equal(a, b):
            yield name
    elif isinstance(a, dict) and isinstance(b, dict):
        for key in {**a, **b}:
            yield from differences(f"{name}/{key}", a.get(key), b.get(key))
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differences(f"{name}/{i}", x, y)
    elif a != b:
        yield f"{name}: {a!r} {b!r}"


def whole_state(model, optimizer, scheduler=None, scaler=None, guard=None) -> dict[str, Any]:
    stats = guard.state_dict()["stats"] if guard else None  # first: it takes in what is still under way
    return copy.deepcopy(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict() if scheduler else None,
            "scaler": scaler.state_dict() if scaler else None,
            "stats": stats,
            "random": [torch.get_rng_state(), random.getstate()],
        }
    )


def finite(model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    tensors = [*model.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor))]
    return all(bool(torch.isfinite(t).all()) for t in tensors)


@contextmanager
def syncs_raise():
    """Every wait of the host for the device is an error."""
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the mode calls itself a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
