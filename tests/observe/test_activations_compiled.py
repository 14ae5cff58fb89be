"""Compiled models are observed like eager ones, whenever they were compiled, in one graph; code that runs no hooks is told of."""

from __future__ import annotations

import copy
import logging
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_hooks import PlainHooks, check, observed_run, reference
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanproof
from nanproof import Observe
from toys import batches, poison

pytestmark = [  # torch's own, while it compiles; the second, where any forward hook is inside a compiled part of a model
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
HOW = {"backend": "aot_eager", "fullgraph": True}


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(6), nn.Sequential(nn.Linear(6, 12), nn.ReLU(inplace=True), nn.Linear(12, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return x + self.mlp(self.norm(x)), None


class Tower(nn.Module):
    reentrant: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layers, self.head = nn.Linear(6, 6), nn.ModuleList(Block() for _ in range(2)), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = (layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant))[0]
        return self.head(x)


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]).squeeze(-1), batch[1])


def built() -> Tower:
    torch.manual_seed(0)
    return Tower()


def pick(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output[0]


SITES = [name for name, m in Tower().named_modules() if name and not isinstance(m, nn.ModuleList)]
STEPS = [[b] for b in batches(3)]
ONE_BAD = [STEPS[0], [poison(STEPS[1][0])], STEPS[2]]


def oracle(steps: list[Any]) -> list[Any]:
    model = built()
    return reference(model, torch.optim.SGD(model.parameters(), 1e-2), steps, loss, SITES, pick)


def compiled(how: str) -> nn.Module:
    """The model, compiled in some way, before a guard knows of it."""
    model = built()
    if how == "in place":
        model.compile(**HOW)
        return model
    if how == "a part":
        model.layers[1] = torch.compile(model.layers[1], **HOW)
        return model
    if how == "checkpointed":
        model.reentrant = False
    if how in ("in parts", "inside checkpoints", "inside reentrant checkpoints"):
        model.reentrant = None if how == "in parts" else "reentrant" in how
        for layer in model.layers:
            layer.compile(**HOW)
        return model
    model = torch.compile(model, **HOW)
    if how == "after a call":
        loss(model, batches(1)[0]).backward()
        model.zero_grad()
    return model


@pytest.mark.parametrize(
    ("how", "lag"),
    [
        ("before", 0),
        ("before", 2),
        ("after a call", 0),
        ("in place", 0),
        ("a part", 0),
        ("in parts", 0),
        ("checkpointed", 0),
        ("inside checkpoints", 0),
        ("inside reentrant checkpoints", 0),
    ],
)
def test_a_compiled_model_is_seen_as_if_it_were_not(how, lag):
    """The same numbers, under the user's names; fullgraph, so nothing broke the graph; nothing of replays."""
    model = compiled(how)
    steps = ONE_BAD if how in ("before", "checkpointed") else STEPS
    guard = observed_run(model, torch.optim.SGD(model.parameters(), 1e-2), steps, loss, lag)
    assert [r.action for r in guard.history].count("skipped") == (steps is ONE_BAD)
    for record, seen in zip(guard.history, oracle(steps), strict=True):
        assert record.observed is not None and list(record.observed.sites) == SITES
        check(record.observed, *seen, tolerance=1e-4)


@pytest.mark.parametrize("how", ["in place", "function", "wrapped"])
def test_compiled_after_the_guard_was_made(how):
    model = built()
    observe = Observe(modules="*", every=1)
    called: dict[str, Any] = {"model": model, "loss": loss}
    guard = nanproof.Guard(
        model, torch.optim.SGD(model.parameters(), 1e-2), loss_fn=lambda m, b: called["loss"](called["model"], b), observe=observe
    )
    if how == "in place":
        model.compile(**HOW)
    elif how == "wrapped":
        called["model"] = torch.compile(model, **HOW)
    else:
        called["loss"] = torch.compile(loss, **HOW)
    with guard:
        for [batch] in STEPS:
            guard.train_step(batch)
    for record, seen in zip(guard.history, oracle(STEPS), strict=True):
        check(record.observed, *seen, tolerance=1e-4)


def test_several_forwards_and_one_backward():
    """What the second forward writes is not what the first one keeps for its backward."""

    def twice(model: nn.Module, batch: Any) -> Tensor:
        return loss(model, batch) + loss(model, [batch[0] * 2, batch[1]])

    model = built()
    seen = reference(model, torch.optim.SGD(model.parameters(), 1e-2), STEPS[:2], twice, SITES, pick)
    model = torch.compile(built(), **HOW)
    guard = observed_run(model, torch.optim.SGD(model.parameters(), 1e-2), STEPS[:2], twice)
    for record, expected in zip(guard.history, seen, strict=True):
        check(record.observed, *expected, tolerance=1e-4)


def test_full_and_light_looks_are_two_graphs_and_never_more():
    model = torch.compile(built(), **HOW)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with nanproof.Guard(model, optimizer, loss_fn=loss, observe=Observe(modules="*", every=2)) as guard:
        for [batch] in STEPS[:2]:
            guard.train_step(batch)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for [batch] in STEPS + STEPS:
                guard.train_step(batch)
    assert len(guard.history) == 8 and not guard.incidents
    for i, record in enumerate(guard.history):
        assert record.observed is not None and set(record.observed.by_site) == set(SITES)
        assert bool(record.observed.outputs) == bool(record.observed.gradients) == (i % 2 == 0)


def test_evaluation_of_compiled_code_is_not_counted():
    """In a loop of one's own, where nothing else tells a step's forwards from others."""
    model = built()
    twin = copy.deepcopy(model)
    hooks = PlainHooks(twin, SITES, pick)
    model = torch.compile(model, **HOW)
    optimizers = [torch.optim.SGD(m.parameters(), 1e-2) for m in (model, twin)]
    with nanproof.Guard(model, optimizers[0], observe=Observe(modules="*", every=1)) as guard:
        for batch in batches(3):
            for which, optimizer in zip((model, twin), optimizers, strict=True):
                optimizer.zero_grad()
                found = loss(which, batch)
                found.backward()
                if which is model:
                    guard.step(found)
                else:
                    nn.utils.clip_grad_norm_(which.parameters(), 1.0)
                    optimizer.step()
            check(guard.history[-1].observed, *hooks.take(), tolerance=1e-4)
            model.eval()
            with torch.no_grad():
                model(batch[0] * 1e6)
            model.train()


def test_weights_are_those_of_the_unobserved_model():
    ends = []
    for observe in (None, Observe(modules="*", every=2)):
        model = torch.compile(built(), **HOW)
        with nanproof.Guard(model, torch.optim.AdamW(model.parameters(), 1e-2), loss_fn=loss, observe=observe) as guard:
            for [batch] in ONE_BAD:
                guard.train_step(batch)
        ends.append(model.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ends[0].values(), ends[1].values(), strict=True))


def test_a_closed_guard_leaves_the_compiled_model_working():
    model = torch.compile(built(), **HOW)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    guard = observed_run(model, optimizer, STEPS[:2], loss)
    loss(model, STEPS[0][0]).backward()
    again = observed_run(model, optimizer, STEPS[:2], loss)
    assert len(guard.history) == len(again.history) == 2
    assert all(r.observed and set(r.observed.by_site) == set(SITES) for r in again.history)


def test_code_that_runs_no_hooks_is_told_of(caplog):
    """A loss function compiled, and called, before the guard was made: torch keeps that code, which has no hooks."""
    model = built()
    fast = torch.compile(loss, **HOW)
    fast(model, batches(1)[0]).backward()
    model.zero_grad()
    with caplog.at_level(logging.WARNING, logger="nanproof"):
        guard = observed_run(model, torch.optim.SGD(model.parameters(), 1e-2), STEPS, fast)
    blind = [r.message for r in caplog.records if "does not run hooks" in r.message]
    seen = [r.observed is not None and bool(r.observed.by_site) for r in guard.history]
    assert blind if not any(seen) else all(seen), "seen, or told"
    assert len(blind) <= 1 and all(math.isfinite(r.loss) for r in guard.history)


def test_an_exported_model_has_no_looks_in_it():
    """Exported while it is observed, between two steps: what is exported runs where there is no nanproof."""
    model = built()
    with nanproof.Guard(
        model, torch.optim.SGD(model.parameters(), 1e-2), loss_fn=loss, observe=Observe(modules="*", every=1)
    ) as guard:
        guard.train_step(STEPS[0][0])
        exported = torch.export.export(model, (STEPS[0][0][0],), strict=False)
        guard.train_step(STEPS[1][0])
    assert not [n for n in exported.graph.nodes if "nanproof" in str(n.target)]
    assert all(r.observed and set(r.observed.by_site) == set(SITES) for r in guard.history)
