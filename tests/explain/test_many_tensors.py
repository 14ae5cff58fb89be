"""A refused step of a large model is explained in a few runs of the step, and a healthy run keeps nothing of its past."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import nanproof
from nanproof.core.support._inner import SMALL, bounds, nonfinite
from nanproof.explain import _examiner
from nanproof.explain._graph import is_added_up
from nanproof.explain._pause import no_collections
from nanproof.explain.locate._trace import Trace
from nanproof.explain.replay._rehearse import Allowance, TakesTooLong
from nanproof.explain.replay._replay import Replay
from zoo.many_tensors import FAULTS, ManyTensors, loss_fn

TENSORS = 2000
RUNS = 4
"""Runs of the step that a diagnosis of it takes: survey, one or two traces, a trial."""
TRACED = {"NaN in the batch": 3.1, "a weight of 1e38": 2.1, "a batch of 1e30": 2.1, "root of 0, in the backward": 2.6}
"""Operations that are traced, for every layer of the model. A whole trace takes 8 a layer; the loss alone, a handful."""


@pytest.fixture
def no_time_to_rehearse(monkeypatch):
    """Whether a second suffices to rehearse the step depends on the machine."""
    monkeypatch.setattr(_examiner, "REFUSED_STEP", 0.0)


def bad_step(name, folder):
    """The incident of one bad step, after a few healthy ones; runs and traced operations of its diagnosis."""
    torch.manual_seed(0)
    model = ManyTensors(TENSORS)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    with nanproof.Guard(model, optimizer, loss_fn=loss_fn, run_dir=folder) as guard:
        for _ in range(5):
            guard.train_step(torch.randn(4, 8))
        guard.train_step(FAULTS[name].spoil(model, torch.randn(4, 8)))
    return guard.incidents[0]


@pytest.fixture
def counts(monkeypatch):
    found, traces = Counter(), []
    run, make = Replay.run, Trace.__init__

    def counted(self, *args, **kwargs):
        found["runs"] += 1
        return run(self, *args, **kwargs)

    def made(self, *args, **kwargs):
        make(self, *args, **kwargs)
        traces.append(self)

    monkeypatch.setattr(Replay, "run", counted)
    monkeypatch.setattr(Trace, "__init__", made)
    return lambda: (found["runs"], sum(len(trace.ops) for trace in traces))


@pytest.mark.usefixtures("no_time_to_rehearse")
@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_step_of_many_tensors_is_explained_in_a_few_runs(name, counts, tmp_path):
    """Cause, place, sample, fix and bundle are there; no training steps are rehearsed while the run waits."""
    fault, incident = FAULTS[name], bad_step(name, tmp_path)
    runs, traced = counts()
    said = incident.diagnosis
    assert (said.cause, said.op, said.where, said.verified) == (fault.cause, fault.op, fault.where, fault.verified)
    assert said.samples == fault.samples
    assert runs <= RUNS
    assert traced <= 100 + TRACED.get(name, 0) * TENSORS / 2
    manifest = json.loads((Path(incident.bundle) / "manifest.json").read_text())
    assert len(manifest["optimizer"]["state"]) == TENSORS
    assert not manifest["left_out"]


@pytest.mark.usefixtures("no_time_to_rehearse")
def test_a_fix_that_takes_too_long_to_try_is_said_to_be_untried(tmp_path):
    said = bad_step("a batch of 1e30", tmp_path).diagnosis
    untried = [sentence for sentence in said.evidence if sentence.startswith("not tried on the replay with inputs of mean 0")]
    assert len(untried) == 1
    assert "training steps would take" in untried[0]
    assert said.confidence == 0.64


def test_an_allowance_stops_what_takes_too_long():
    """Before it begins where that is hopeless, and once two steps show it."""
    with pytest.raises(TakesTooLong) as stopped, Allowance(1.0).timed(40, fastest=0.2):
        pass
    assert (stopped.value.steps, round(stopped.value.seconds)) == (40, 8)
    allowance, done = Allowance(0.1), 0
    with pytest.raises(TakesTooLong), allowance.timed(40, fastest=0.001) as step_is_done:
        for _ in range(40):
            time.sleep(0.01)
            step_is_done()
            done += 1
    assert 1 <= done < 40
    assert allowance.seconds < 0.1
    with Allowance().timed(40, fastest=1000.0) as step_is_done:  # no limit
        step_is_done()


def test_bounds_are_those_of_each_tensor_alone():
    """The oracle looks at one tensor after the other."""
    torch.manual_seed(0)
    shapes = [(8, 8), (8,), (), (3, 1, 5), (SMALL,), (SMALL + 1,), (2, SMALL)]
    tensors: list[Tensor] = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        for shape in shapes * 3:
            t = torch.randn(shape).to(dtype)
            tensors += [t, t.t() if t.dim() == 2 else t.reshape(-1)[:1], nn.Parameter(t.clone())]
    for i, bad in enumerate((float("nan"), float("inf"), -float("inf")) * 9):
        with torch.no_grad():
            tensors[i * 7 % len(tensors)].reshape(-1)[-1:] = bad
    found = bounds(tensors)
    for t, pair in zip(tensors, found, strict=True):
        expected = [float(end) for end in torch.aminmax(t.detach())]
        assert repr(list(pair)) == repr(expected)
    named = [(str(i), t) for i, t in enumerate(tensors)]
    assert nonfinite(named) == [name for name, t in named if not bool(torch.isfinite(t).all())]


def test_a_trace_reads_what_was_there_before_it_was_overwritten():
    """Numbers are looked at together, but before anything is written over them."""

    class Overwrites(nn.Module):
        def forward(self, x):
            a = x / 0
            b = a.detach().clone()
            a.fill_(1.0)
            return a + b.nan_to_num(0.0, 1.0, 1.0)

    model = nn.Sequential(nn.Linear(4, 4), Overwrites())
    trace = Trace(model, None)
    Replay(model, lambda m, b: m(b).sum(), [torch.ones(2, 4)]).run(trace.recording(), backward=False)
    ops = {op.name: op for op in trace.ops}
    assert ops["div"].inf_out and ops["clone"].inf_out
    assert not ops["fill_"].bad and ops["fill_"].inputs[0].range.inf
    assert not ops["add"].bad


def test_only_a_loss_that_may_be_a_sum_is_traced_for_its_terms():
    w = torch.ones(3, requires_grad=True)
    assert is_added_up((w * 2).sum()) and is_added_up(w.sum() + w.prod()) and is_added_up((w.sum() + 1).double().reshape(()))
    assert not is_added_up(w.mean()) and not is_added_up(w.sum() / 3) and not is_added_up((w.sum() + 1) * 2)
    assert is_added_up(torch.ones(()))  # nothing is known

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.sum()

        @staticmethod
        def backward(ctx, gradient):
            return gradient.expand(3)

    assert is_added_up(Own.apply(w))


def test_collections_are_paused_and_come_back():
    assert gc.isenabled()
    with no_collections():
        with no_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with no_collections():
            assert not gc.isenabled()
        assert not gc.isenabled()  # the user's choice
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["disable", "collect"])
def test_collections_come_back_after_ctrl_c(name, monkeypatch):
    """Python raises it as soon as a call returns."""
    inner = getattr(gc, name)

    def interrupted(*given):
        inner(*given)
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, name, interrupted)
    with pytest.raises(KeyboardInterrupt), no_collections():
        pass
    monkeypatch.undo()
    assert gc.isenabled()
    with no_collections():
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize("own_loop", [False, True])
def test_a_healthy_step_does_as_much_as_any_before_it(own_loop, tmp_path):
    """Calls of a step are counted in windows of 100 steps, and objects that stay are counted between them."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    weights = torch.randn(4, 1)

    def loss_of(model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    with nanproof.Guard(model, optimizer, loss_fn=None if own_loop else loss_of, run_dir=tmp_path) as guard:

        def steps(count):
            for _ in range(count):
                x = torch.randn(8, 4)
                batch = x, x @ weights + 0.1 * torch.randn(8, 1)
                if own_loop:
                    optimizer.zero_grad()
                    loss = loss_of(model, batch)
                    loss.backward()
                    guard.step(loss)
                else:
                    guard.train_step(batch)

        def window():
            calls = 0

            def count(_frame, event, _argument):
                nonlocal calls
                calls += event in ("call", "c_call")

            before = sys.getprofile()
            sys.setprofile(count)
            try:
                steps(100)
            finally:
                sys.setprofile(before)
            gc.collect()
            return calls, len(gc.get_objects())

        steps(1200)
        first = window()
        steps(1900)
        last = window()
    assert not guard.incidents
    assert last[0] <= 1.01 * first[0]
    assert last[1] <= first[1] + 20
