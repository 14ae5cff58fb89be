"""Optimizers that contain optimizers, as they are written elsewhere, a mix of two for one model, and a run over them."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

import nanproof
from nanproof import TrainingHalted
from nanproof.core import _evidence

CAUSE = "optimizer-made-nonfinite"


class Container(torch.optim.Optimizer):
    """A list of optimizers behind one face, as torchtitan has it: its own groups are copies that no step reads."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], **defaults: Any) -> None:
        self.optimizers = optimizers
        super().__init__([p for each in optimizers for group in each.param_groups for p in group["params"]], defaults)

    def step(self, closure: Any = None) -> None:
        for each in self.optimizers:
            each.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.optimizers:
            each.zero_grad(set_to_none)


class Lookahead(torch.optim.Optimizer):
    """Slow weights that follow the fast ones of the optimizer inside, every `k` steps."""

    def __init__(self, optimizer: torch.optim.Optimizer, k: int = 3, alpha: float = 0.5) -> None:
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        super().__init__([{**group} for group in optimizer.param_groups], {})
        self.param_groups = optimizer.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in (p for group in self.param_groups for p in group["params"]):
            self.state[p].setdefault("slow", p.clone())
        self.optimizer.step()
        self.count += 1
        if self.count % self.k == 0:
            for p in (p for group in self.param_groups for p in group["params"]):
                p.copy_(self.state[p]["slow"].lerp_(p, self.alpha))


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation: its step wants a closure that runs the forward again."""

    def __init__(self, params: Any, base: type[torch.optim.Optimizer], **settings: Any) -> None:
        super().__init__(params, {"rho": 0.05, **settings})
        self.base_optimizer = base(self.param_groups, **settings)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        assert closure is not None, "step() needs a closure"


class Words(nn.Module):
    """An embedding, a hidden layer and a head; the ids of a batch leave most rows of the table unused."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 8, sparse=sparse)
        self.hidden, self.head = nn.Linear(8, 16, bias=False), nn.Linear(16, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embed(ids).mean(1)))).squeeze(-1)


def words(count: int, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(0, 6, (8, 4), generator=g)
        made.append((ids, ids.float().mean(1) / 3 - 1))
    return made


def regress(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]).float(), batch[1])


def muon_and_adamw(model: nn.Module, lr: float = 1e-2, **adamw: Any) -> list[torch.optim.Optimizer]:
    """Muon for the hidden matrix, AdamW for the rest, as language models are trained."""
    rest = [p for name, p in model.named_parameters() if not name.startswith("hidden")]
    return [torch.optim.Muon([model.get_parameter("hidden.weight")], lr=lr), torch.optim.AdamW(rest, lr=1e-2, **adamw)]


def trained(model, optimizer, data, loss_fn=regress, between=None, scheduler=None, policy=None, **options):
    """A guarded run. `between(step)` is called before each step; a halt ends it."""
    guard = nanproof.Guard(
        model, optimizer, loss_fn=loss_fn, scheduler=scheduler, policy=nanproof.Policy(**(policy or {})), **options
    )
    with suppress(TrainingHalted), guard:
        for step, batch in enumerate(data):
            if between is not None:
                between(step)
            guard.train_step(batch)
    return guard


def reading(**more):
    return SimpleNamespace(**{"loss": 0.5, "total": 1.0, "weights_bad": False, "bad_setting": True, **more})


def witness(**more):
    facts = {"loss_bad": False, "buffers_bad": False, "weights_bad": False, "rank": None, "micro_batch": None, "guilty": 0}
    return _evidence.Witness(**{**facts, **more})


def rooted(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The norm of an embedding row: its gradient is NaN where the row is 0."""
    return regress(model, batch) + (model.embed(batch[0]).square().sum(-1)).sqrt().mean()


def sparse_and_dense(model: nn.Module) -> list[torch.optim.Optimizer]:
    """SparseAdam for the table, AdamW for the rest."""
    rest = [p for name, p in model.named_parameters() if name != "embed.weight"]
    return [torch.optim.SparseAdam([model.embed.weight], lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]
