"""A model whose structure changes while it trains, the two ways to train it, and everything a step may write."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanproof
from guard.guarding import NAN, with_gradient
from toys import differences

LOOPS = ("step", "train_step")


def cast(x: Tensor, module: nn.Module) -> Tensor:
    """Return `x` in the dtype of the module's first tensor."""
    return x.to(next(chain(module.parameters(), module.buffers())).dtype)


class Net(nn.Module):
    """An embedding, a body with a tied weight, a list that grows, and a head. Each part may have its own dtype."""

    def __init__(self, *extra: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.body = nn.Linear(6, 8)
        self.tied = nn.Linear(6, 8, bias=False)
        self.tied.weight = self.body.weight
        self.extra = nn.ModuleList(extra)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        x = x + self.embed(ids)
        hidden = self.body(cast(x, self.body)) + self.tied(cast(x, self.tied))
        for module in self.extra:
            hidden = module(cast(hidden, module))
        return self.head(cast(hidden.tanh(), self.head)).squeeze(-1).float()


def samples(count: int, seed: int = 1) -> list[list[Any]]:
    """Return batches of inputs, token ids and targets."""
    g = torch.Generator().manual_seed(seed)
    return [
        [torch.randn(8, 6, generator=g), torch.randint(0, 10, (8,), generator=g), torch.randn(8, generator=g)]
        for _ in range(count)
    ]


def spoiled(batch: list[Any], value: float = NAN) -> list[Any]:
    """Return the batch with one input set to `value`."""
    x = batch[0].clone()
    x[2, 1] = value
    return [x, *batch[1:]]


def fit(model: nn.Module, batch: list[Any]) -> Tensor:
    """Return the loss. If the batch names a parameter, one element of that parameter's gradient is NaN; the loss is finite."""
    x, ids, y, *names = batch
    loss = F.mse_loss(model(x, ids), y)
    for name in names:
        p = model.get_parameter(name)
        loss = loss + (with_gradient(p.view_as(p), NAN) * 0).sum().float()
    return loss


class Loop:
    """Trains through a guard, in your own loop or with `train_step`; without a guard, clips and steps as torch does."""

    def __init__(
        self, how: str, model: nn.Module, optimizers: Any, *, loss_fn: Any = fit, policy: Any = None, **kwargs: Any
    ) -> None:
        self.how, self.model, self.loss_fn = how, model, loss_fn
        self.optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        self.given, self.max_norm = optimizers, kwargs.get("max_norm", 1.0)
        self.settings = {"loss_fn": loss_fn, "policy": nanproof.Policy(**(policy or {})), **kwargs}
        self.guard: Any = None
        self.renew()

    def renew(self) -> None:
        """Replace the guard with a fresh one, as if training started here."""
        self.close()
        if self.how != "plain":
            self.guard = nanproof.Guard(self.model, self.given, **self.settings)

    def close(self) -> None:
        if self.guard is not None:
            self.guard.close()

    def step(self, batch: Any) -> None:
        if self.how == "train_step":
            self.guard.train_step(batch)
            return
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = self.loss_fn(self.model, batch)
        loss.backward()
        if self.guard is not None:
            self.guard.step(loss)
            return
        if self.max_norm is not None:
            nn.utils.clip_grad_norm_([p for o in self.optimizers for g in o.param_groups for p in g["params"]], self.max_norm)
        for optimizer in self.optimizers:
            optimizer.step()

    def refused(self, batch: Any) -> Any:
        """Take a step that must be refused without a trace; return its incident."""
        before = self.state()
        self.step(batch)
        self.guard.sync()
        changed = list(differences("", before, self.state()))
        assert self.guard.history[-1].action == "skipped", "the bad step was taken"
        assert not changed, f"the refused step changed {changed}"
        return self.guard.incidents[-1]

    def state(self) -> dict[str, Any]:
        return state_of(self.model, self.optimizers)


def state_of(model: nn.Module, optimizers: Sequence[Any]) -> dict[str, Any]:
    """Return a copy of all weights, buffers, tensor attributes and optimizer state, by name.

    State that is zero throughout counts as none: an optimizer creates it before it learns that a step is refused.
    """
    names = {p: name for name, p in model.named_parameters()}
    state = {}
    for at, optimizer in enumerate(optimizers):
        for number, group in enumerate(optimizer.param_groups):
            for index, p in enumerate(group["params"]):
                kept = optimizer.state.get(p) or {}
                if any(bool(torch.as_tensor(x).any()) for x in leaves(kept)):
                    state[names.get(p, f"{at}.{number}.{index}")] = kept
    attributes = {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, Tensor)
    }
    found = {
        "weights": dict(model.named_parameters()),
        "buffers": dict(model.named_buffers()),
        "attributes": attributes,
        "moments": state,
    }
    return clone(found)


def leaves(value: Any) -> Iterable[Any]:
    """Return the tensors and numbers in nested containers."""
    if isinstance(value, dict):
        return chain.from_iterable(leaves(x) for x in value.values())
    if isinstance(value, (list, tuple)):
        return chain.from_iterable(leaves(x) for x in value)
    return [value] if isinstance(value, (Tensor, int, float)) else []


def clone(value: Any) -> Any:
    """Return nested containers with every tensor cloned."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, dict):
        return {key: clone(x) for key, x in value.items()}
    if isinstance(value, (list, tuple)):
        return [clone(x) for x in value]
    return copy.copy(value)


def all_finite(state: dict[str, Any]) -> bool:
    return all(bool(torch.as_tensor(x).isfinite().all()) for x in leaves(state))


def swap(optimizer: Any, old: nn.Module, new: nn.Module) -> None:
    """Put the parameters of one module where those of another stand in the lists of the groups; drop the old state."""
    replacement = dict(zip(old.parameters(), new.parameters(), strict=True))
    for group in optimizer.param_groups:
        for i, p in enumerate(group["params"]):
            if p in replacement:
                group["params"][i] = replacement[p]
                optimizer.state.pop(p, None)
