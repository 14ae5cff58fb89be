"""Compiled models are observed like eager ones, whenever they were compiled, in one graph; code that runs no hooks is told of."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from plain_hooks import PlainHooks, check, observed_run, reference
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanproof
from nanproof import Observe
from nanproof.observe._activations import Observer
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


def run_once(model: nn.Module, loss_fn: Any) -> None:
    loss_fn(model, STEPS[0][0]).backward()
    model.zero_grad()


def compiled_as(model: nn.Module, how: str) -> tuple[nn.Module, Any]:
    """The model and the loss function to call."""
    if how == "in place":
        model.compile(**HOW)
    elif how == "in parts":
        for layer in model.layers:
            layer.compile(**HOW)
    elif how == "wrapped parts":
        for i in range(len(model.layers)):
            model.layers[i] = torch.compile(model.layers[i], **HOW)
    elif how == "wrapped":
        return torch.compile(model, **HOW), loss
    else:
        return model, torch.compile(loss, **HOW)
    return model, loss


@pytest.mark.parametrize("when", ["before", "run before", "after"])
@pytest.mark.parametrize("how", ["in place", "wrapped", "in parts", "wrapped parts", "function"])
def test_a_model_is_seen_whatever_else_was_compiled(how, when):
    """Torch shares code between instances of a class and does not check for hooks. Another instance, unobserved, is compiled and
    called before the guard is made and after every step, with and without gradients."""
    other, other_loss = compiled_as(built(), how)
    run_once(other, other_loss)
    model, loss_fn = built(), loss
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    called: dict[str, Any] = {}
    if when != "after":
        model, loss_fn = compiled_as(model, how)
    if when == "run before":
        run_once(model, loss_fn)
    guard = nanproof.Guard(
        model, optimizer, loss_fn=lambda m, b: called["loss"](called["model"], b), observe=Observe(modules="*", every=2)
    )
    if when == "after":
        model, loss_fn = compiled_as(model, how)
    called.update(model=model, loss=loss_fn)
    with guard:
        for [batch] in STEPS:
            guard.train_step(batch)
            run_once(other, other_loss)
            with torch.no_grad():
                other(batch[0])
    for i, (record, seen) in enumerate(zip(guard.history, oracle(STEPS), strict=True)):
        check(record.observed, *seen, full=i % 2 == 0, tolerance=1e-4)


def test_two_guards_see_their_own_model():
    models = [built(), built()]
    with torch.no_grad():
        models[1].first.weight *= 100
    compiled_models = [torch.compile(m, **HOW) for m in models]
    guards = [
        nanproof.Guard(m, torch.optim.SGD(m.parameters(), 1e-6), loss_fn=loss, observe=Observe(modules="*", every=2))
        for m in compiled_models
    ]
    for [batch] in STEPS:
        for guard in guards:
            guard.train_step(batch)
    seen = []
    for guard in guards:
        guard.close()
        seen.append([r.observed.by_site for r in guard.history if r.observed is not None])
    for mine, its in zip(*seen, strict=True):
        assert set(mine) == set(its) == set(SITES)
        assert its["first"] > 10 * mine["first"]


class Deep(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Block() for _ in range(blocks)), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


def test_blocks_compiled_one_by_one_share_their_code():
    """As they do unobserved: torch compiles one function eight times at the most, and with fullgraph raises then."""
    model = Deep(12)
    for layer in model.layers:
        layer.compile(**HOW)
    guard = observed_run(model, torch.optim.SGD(model.parameters(), 1e-2), STEPS, loss, every=2)
    assert not guard.incidents and len(guard.history) == len(STEPS)
    assert all(r.observed is not None and len(r.observed.by_site) == len(r.observed.sites) for r in guard.history)


class Scaled(nn.Module):
    """Its output is x times a factor, in x's dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Identity()

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return self.inner(x * factor) * 1


class Half(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight, self.scaled, self.dtype = nn.Parameter(torch.ones(())), Scaled(), dtype

    def forward(self, x: Tensor, factor: float) -> Tensor:
        return self.weight * self.scaled(x.to(self.dtype), factor).float().nan_to_num(0, 1, 1).mean()


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_light_looks_of_compiled_code_are_exact(backend, dtype):
    """The compiler computes in float32 what the output holds in 16 bits: 65504 times 1.001 is Inf there. NaN is never lost."""
    model = Half(dtype)
    model.compile(backend=backend, fullgraph=True, dynamic=False)
    odd = [3.14159, 65504.0, math.nan, math.inf, -math.inf, 1e-7]
    batches = [torch.tensor([0.1, -value, 0.2, 0.3] * 5).to(dtype).float() for value in odd]
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    observe = Observe(modules=["scaled", "scaled.inner"], every=1000, forecast=False)
    with nanproof.Guard(model, optimizer, loss_fn=lambda m, b: m(b, 1.001), observe=observe) as guard:
        for x in [torch.ones(20), *batches]:
            guard.train_step(x)
    for record, x in zip(guard.history[1:], batches, strict=True):
        expected = float((x.to(dtype) * 1.001).abs().max())
        assert record.observed is not None and not record.observed.outputs
        for value in record.observed.absmax:
            assert value == expected or (value != value and expected != expected), (record.step, value, expected)


def test_what_makes_torch_compile_anew_is_taken_back():
    """Observed modules get a forward of their own, which is their class's. It is gone with the guard, and a copy has its own."""
    model = built()
    before = {name: set(vars(m)) for name, m in model.named_modules()}
    guard = nanproof.Guard(model, torch.optim.SGD(model.parameters(), 1e-2), loss_fn=loss, observe=Observe(modules="*"))
    twin = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(model))
    with torch.no_grad():
        for m in (twin, again):
            m.first.weight.zero_()
            m.first.bias.zero_()
            assert torch.equal(m.first(torch.ones(6)), torch.zeros(6)), "it calls itself, not the original"
        assert not torch.equal(model.first(torch.ones(6)), torch.zeros(6))
    guard.close()
    assert {name: set(vars(m)) for name, m in model.named_modules()} == before
    assert not any(m._forward_hooks for m in model.modules())


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


def test_a_replica_for_another_device_has_its_own_weights():
    """`nn.DataParallel` copies what is on an instance, its forward too."""
    import torch._dynamo  # as every optimizer does

    module = nn.Linear(4, 8)
    observer = Observer(nn.Sequential(module), Observe(), torch.device("cpu"))
    observer.begin(False)
    for source in (module, copy.deepcopy(module)):
        assert "forward" in vars(source)
        replica = source._replicate_for_data_parallel()
        again = replica._replicate_for_data_parallel()
        for each in (replica, again):
            each.weight, each.bias = torch.zeros(8, 4), torch.zeros(8)  # no parameters: as `nn.parallel.replicate` does
            assert not each(torch.ones(2, 4)).any()
    observer.close()
    assert not {"forward", "_replicate_for_data_parallel"} & vars(module).keys()
    module.forward = lambda x: x + 1  # of somebody else: as torch does it
    assert torch.equal(module._replicate_for_data_parallel()(torch.ones(1)), torch.full((1,), 2.0))
