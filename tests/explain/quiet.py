"""Small runs that fail without a NaN, and healthy ones that look like them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanproof

Loss = Callable[[nn.Module, Any], Tensor]


@dataclass
class Trained:
    """What a run came to."""

    guard: nanproof.Guard
    calls: int = 0
    """How often the loss function was called, by the loop or by a replay."""
    noticed: dict[str, int] = field(default_factory=dict)
    """Causes, and the step during which each was reported."""

    @property
    def causes(self) -> list[str]:
        return [i.diagnosis.cause for i in self.guard.incidents if i.diagnosis is not None]

    @property
    def quiet(self) -> bool:
        return self.guard.incidents == []


def train(model: nn.Module, optimizer: Any, loss_fn: Loss, steps: int, batch: Callable[[int], Any], **kwargs: Any) -> Trained:
    calls: list[int] = []

    def counted(model: nn.Module, b: Any) -> Tensor:
        calls.append(1)
        return loss_fn(model, b)

    guard = nanproof.Guard(model, optimizer, loss_fn=counted, **kwargs)
    noticed: dict[str, int] = {}
    for i in range(steps):
        guard.train_step(batch(i))
        for incident in guard.incidents:
            if incident.diagnosis is not None:
                noticed.setdefault(incident.diagnosis.cause, i)
    guard.close()
    return Trained(guard, len(calls), noticed)


def own_loop(
    model: nn.Module, optimizer: Any, loss_fn: Loss, steps: int, batch: Callable[[int], Any], clear: bool = True
) -> Trained:
    """A loop that calls backward itself; the guard sees the loss, and cannot compute it again."""
    guard = nanproof.Guard(model, optimizer)
    trained = Trained(guard)
    for i in range(steps):
        if clear:
            optimizer.zero_grad()
        trained.calls += 1
        loss = loss_fn(model, batch(i))
        loss.backward()
        guard.step(loss)
        for incident in guard.incidents:
            if incident.diagnosis is not None:
                trained.noticed.setdefault(incident.diagnosis.cause, i)
    guard.close()
    return trained


def generator(i: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 + i)


def regression(i: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 6, generator=generator(i))
    return x, x[:, 0] - x[:, 1]


def classes(i: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 6, generator=generator(i))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def mlp(outputs: int = 1, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, outputs))


def squared(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]).squeeze(-1), batch[1])


def crossed(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])
