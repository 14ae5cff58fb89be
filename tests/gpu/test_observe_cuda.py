"""Observing on CUDA: the kernel against plain torch, compiled models, checkpoints, graphs, and no waiting."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import nanproof
from nanproof._records import ABSENT
from nanproof.observe._kernels import TritonTable, make_table
from nanproof.observe._tables import COLUMNS, PlainTable, Seen
from toys import syncs_raise

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:.*TensorFloat32:UserWarning"),
]
DEVICE = torch.device("cuda", 0)


def same(fast: list[float], slow: list[float], counted_to: float = 2**24) -> None:
    assert len(fast) == len(slow)
    for name, a, b in zip(COLUMNS, fast, slow, strict=False):
        exact = name in ("absmax", "nan", "inf", "zeros", "near") and (b < counted_to or b != b)
        assert (a != a and b != b) or (a == b if exact else math.isclose(a, b, rel_tol=1e-5)), (name, a, b)


def same_largest(fast: Seen, slow: Seen) -> None:
    for a, b in zip(fast.absmax, slow.absmax, strict=True):
        assert a == b or (a != a and b != b), (fast, slow)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("shape", [(1,), (17,), (3, 4096), (8, 1024, 1023), (5, 7, 11, 13)])
def test_the_kernel_says_what_plain_torch_says(dtype, full, shape):
    torch.manual_seed(0)
    fast, slow = make_table(4, DEVICE), PlainTable(4, torch.device("cpu"))
    assert isinstance(fast, TritonTable)
    fast.full = slow.full = full
    squares = [0.0] * 4
    for call in range(2):
        for row, spoil in enumerate((None, math.nan, math.inf, 0.0)):
            x = torch.randn(shape, device=DEVICE) * 3
            flat = x.view(-1)
            if spoil is not None:
                flat[:: 7 + call] = spoil
            elif dtype != torch.float16:
                flat[0] = 2.9e38
            x = x.to(dtype)
            fast.look(x, row)
            slow.look(x.cpu(), row)
            squares[row] += float(x.double().square().sum())
    first, second = fast.send()(), slow.send()()
    same_largest(first, second)
    # plain torch sums in fp32, to three digits
    a, b = first.rows, {row: [*seen[:2], squares[row], *seen[3:]] for row, seen in second.rows.items()}
    assert a.keys() == b.keys() and bool(a) == full
    for row in a:
        same(a[row], b[row])
    assert fast.send()() == Seen([ABSENT] * 4), "the table is empty after it was read"


def test_tensors_that_do_not_fill_their_memory_and_other_dtypes():
    fast, slow = TritonTable(4, DEVICE), PlainTable(4, torch.device("cpu"))
    fast.full = slow.full = True
    base = torch.randn(64, 96, device=DEVICE)
    for row, x in enumerate((base[:, ::3], base.t(), base.double() * 1e60, base[:1].expand(5, 96))):
        fast.look(x, row)
        slow.look(x.cpu(), row)
    a, b = fast.send()(), slow.send()()
    same_largest(a, b)
    for row in b.rows:
        same(a.rows[row], b.rows[row])


def test_plain_torch_on_the_device_says_the_same():
    on_device, on_host = PlainTable(4, DEVICE), PlainTable(4, torch.device("cpu"))
    for full in (False, True):
        on_device.full = on_host.full = full
        x = torch.randn(3, 1000, device=DEVICE)
        x[0, 0], x[1, :5] = 3e38, 0
        on_device.look(x, 1)
        on_host.look(x.cpu(), 1)
        a, b = on_device.send()(), on_host.send()()
        same_largest(a, b)
        if full:
            same(a.rows[1], b.rows[1])


def test_a_captured_graph_follows_light_and_full():
    table = TritonTable(1, DEVICE)
    x = torch.randn(4096, device=DEVICE)
    table.look(x, 0)
    table.send()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        table.look(x, 0)
        table.flush()
    for full in (False, True):
        table.full = full
        graph.replay()
        seen = table.send()()
        assert seen.absmax == [float(x.abs().max())] and bool(seen.rows) == full
        if full:
            assert math.isclose(seen.rows[0][2], float(x.square().sum()), rel_tol=1e-5)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = (
            nn.LayerNorm(width),
            nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True), nn.Linear(width, width)),
        )

    def forward(self, x):
        return x + self.mlp(self.norm(x))


class Tower(nn.Module):
    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.layers, self.checkpointed = nn.ModuleList(Block(64) for _ in range(3)), checkpointed

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if self.checkpointed is None else checkpoint(layer, x, use_reentrant=self.checkpointed)
        return x


def observed(model: nn.Module, steps: int = 3) -> list[nanproof.StepRecord]:
    torch.manual_seed(1)
    batches = [torch.randn(32, 64, device=DEVICE, requires_grad=True) for _ in range(steps)]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    guard = nanproof.Guard(
        model, optimizer, loss_fn=lambda m, b: m(b).square().mean(), observe=nanproof.Observe(modules="*", every=2)
    )
    with guard:
        for batch in batches:
            guard.train_step(batch)
    assert not guard.incidents
    return guard.history


def built(checkpointed: bool | None = None) -> Tower:
    torch.manual_seed(0)
    return Tower(checkpointed).to(DEVICE)


@pytest.mark.parametrize("checkpointed", [True, False])
def test_checkpoints_are_counted_once(checkpointed):
    for plain, other in zip(observed(built()), observed(built(checkpointed)), strict=True):
        assert plain.observed is not None and other.observed is not None
        torch.testing.assert_close(torch.tensor(plain.observed.absmax), torch.tensor(other.observed.absmax))
        for name, column in {**plain.observed.outputs, **{f"g{k}": v for k, v in plain.observed.gradients.items()}}.items():
            theirs = other.observed.gradients[name[1:]] if name[0] == "g" else other.observed.outputs[name]
            torch.testing.assert_close(torch.tensor(column), torch.tensor(theirs), msg=name)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, while it compiles
@pytest.mark.parametrize("when", ["before", "after a call", "in place"])
def test_compiled_models_are_seen_whenever_they_were_compiled(when):
    plain = observed(built())
    model = built()
    if when == "in place":
        model.compile(fullgraph=True)
    else:
        model = torch.compile(model, fullgraph=True)
    if when == "after a call":
        model(torch.randn(32, 64, device=DEVICE, requires_grad=True)).sum().backward()
        model.zero_grad()
    for a, b in zip(plain, observed(model), strict=True):
        assert a.observed is not None and b.observed is not None and a.observed.sites == b.observed.sites
        # Written in place by the ReLU: in the first step it was too late to look at it.
        theirs = [y if x != ABSENT else ABSENT for x, y in zip(a.observed.absmax, b.observed.absmax, strict=True)]
        torch.testing.assert_close(torch.tensor(a.observed.absmax), torch.tensor(theirs), rtol=1e-2, atol=1e-2)
        assert set(a.observed.gradients) == set(b.observed.gradients)
        for name in a.observed.gradients:
            theirs = torch.tensor(b.observed.gradients[name])
            torch.testing.assert_close(torch.tensor(a.observed.gradients[name]), theirs, rtol=5e-2, atol=5e-2, msg=name)


def test_observing_makes_the_host_wait_for_nothing():
    model = built()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    batch = torch.randn(32, 64, device=DEVICE)
    observe = nanproof.Observe(modules="*", every=2)
    with nanproof.Guard(model, optimizer, loss_fn=lambda m, b: m(b).square().mean(), observe=observe) as guard:
        for _ in range(4):
            guard.train_step(batch)
        torch.cuda.synchronize()
        with syncs_raise():
            for _ in range(20):
                guard.train_step(batch)
    assert sum(bool(r.observed and r.observed.gradients) for r in guard.history) == 12


def test_observing_changes_no_weight():
    ends = []
    for observe in (None, nanproof.Observe(modules="*", every=1)):
        model = built()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        torch.manual_seed(2)
        with nanproof.Guard(model, optimizer, loss_fn=lambda m, b: m(b).square().mean(), observe=observe) as guard:
            for step in range(8):
                batch = torch.randn(32, 64, device=DEVICE)
                if step == 3:
                    batch[0, 0] = math.nan
                guard.train_step(batch)
        assert len(guard.incidents) == 1
        ends.append([p.detach().clone() for p in model.parameters()])
        if observe is not None:
            bad = guard.history[3].observed
            assert guard.history[3].action == "skipped" and bad is not None and bad.absmax[0] != bad.absmax[0]
            assert all(math.isfinite(v) for r in guard.history if r.step != 3 and r.observed for v in r.observed.absmax)
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def test_weights_are_sampled_in_one_launch_as_torch_samples_them():
    from nanproof.core.judge._parameters import Parameters
    from nanproof.observe._weights import WeightWatch

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(3000, 40), nn.Linear(40, 300), nn.Linear(300, 7, bias=False)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    watch, slow = (WeightWatch(model, Parameters(model, optimizer), optimizer) for _ in range(2))
    assert watch._reader is not None
    slow._reader = None
    watch.before()
    slow.before()
    model(torch.arange(50, device=DEVICE)).square().mean().backward()
    optimizer.step()
    fast, plain = watch.after(), slow.after()
    assert fast is not None and plain is not None and fast() == plain()
    assert torch.equal(watch._after, slow._after)
