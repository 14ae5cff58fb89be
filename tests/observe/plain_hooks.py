"""The slow oracle of observed activations: plain hooks that keep a copy of every output and gradient, in a plain loop."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import nanproof
from nanproof import Observed
from nanproof._records import ABSENT

Seen = dict[str, list[Tensor]]
"""By site: every tensor, in order."""


class PlainHooks:
    """Keeps copies of what chosen modules return, and of the gradients that come back to it."""

    def __init__(self, model: nn.Module, sites: Sequence[str], pick: Callable[[Any], Tensor] = lambda output: output) -> None:
        self.outputs: Seen = {}
        self.gradients: Seen = {}
        self._pick = pick
        for name in sites:
            model.get_submodule(name).register_forward_hook(lambda m, a, output, name=name: self._forward(name, output))

    def _forward(self, name: str, output: Any) -> None:
        x = self._pick(output)
        self.outputs.setdefault(name, []).append(x.detach().clone())
        if x.requires_grad:
            x.register_hook(lambda g: self.gradients.setdefault(name, []).append(g.detach().clone()))

    def take(self) -> tuple[Seen, Seen]:
        taken = self.outputs, self.gradients
        self.outputs, self.gradients = {}, {}
        return taken


def statistics(tensors: list[Tensor] | None) -> dict[str, float] | None:
    """As they are recorded."""
    if not tensors:
        return None
    x = torch.cat([t.double().reshape(-1) for t in tensors])
    near = torch.finfo(tensors[0].dtype).max / 8
    return {
        "absmax": float(x.abs().max()),
        "rms": float(x.square().mean().sqrt()),
        "nan": float(x.isnan().sum()),
        "inf": float(x.isinf().sum()),
        "zeros": float((x == 0).double().mean()),
        "near": float((x.isfinite() & (x.abs() >= near)).double().mean()),
    }


def close(a: float, b: float, tolerance: float) -> bool:
    return (a != a and b != b) or math.isclose(a, b, rel_tol=tolerance, abs_tol=1e-12)


def check(observed: Observed | None, outputs: Seen, gradients: Seen, full: bool = True, tolerance: float = 1e-5) -> None:
    """A record says what the plain hooks saw."""
    assert observed is not None
    assert set(observed.outputs) == ({"rms", "nan", "inf", "zeros", "near"} if full else set())
    if full and gradients:
        assert set(observed.gradients) == {"absmax", *observed.outputs}
    elif not full:
        assert not observed.gradients
    for i, site in enumerate(observed.sites):
        for columns, seen in (({"absmax": observed.absmax, **observed.outputs}, outputs), (observed.gradients, gradients)):
            expected = statistics(seen.get(site))
            for name, values in columns.items():
                wanted = ABSENT if expected is None else expected[name]
                assert close(values[i], wanted, tolerance), (site, name, values[i], wanted)


def reference(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: Sequence[Sequence[Any]], loss_fn: Any, sites: Sequence[str],
    pick: Callable[[Any], Tensor] = lambda output: output,
) -> list[tuple[Seen, Seen]]:  # fmt: skip
    """A plain loop over steps of micro-batches. A bad one is taken back, with all it left behind."""
    hooks, found = PlainHooks(model, sites, pick), []
    for micro_batches in steps:
        state, random_state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
        optimizer.zero_grad()
        total = 0.0
        for batch in micro_batches:
            loss = loss_fn(model, batch) / len(micro_batches)
            loss.backward()
            total += loss.item()
        found.append(hooks.take())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if math.isfinite(total) and math.isfinite(norm.item()):
            optimizer.step()
        else:
            model.load_state_dict(state)
            torch.set_rng_state(random_state)
    return found


def observed_run(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Sequence[Sequence[Any]],
    loss_fn: Any,
    lag: int = 0,
    **settings: Any,
) -> nanproof.Guard:
    """The same with a guard that observes."""
    observe = nanproof.Observe(**{"modules": "*", "every": 1, **settings})
    policy = nanproof.Policy(lag=lag)
    with nanproof.Guard(model, optimizer, loss_fn=loss_fn, observe=observe, policy=policy) as guard:
        for micro_batches in steps:
            guard.train_step(*micro_batches)
    return guard
