"""A loop's own lines in `guard.step` loops: what a healthy step must not do, and what is not run again."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import nanproof
from nanproof.explain.lines._lines import Blocked, Inputs
from nanproof.explain.lines._recorded import RootRecorder


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


class Loop:
    """Asks a recorder at every backward, as a guard does."""

    def __init__(self, model: nn.Module) -> None:
        self.recorder, self.answers = RootRecorder(model, lambda call: None), []

    def backward(self, loss: torch.Tensor) -> None:
        self.answers.append(self.recorder.source_of(loss, argument="loss"))
        loss.backward()

    @property
    def last(self) -> Any:
        return self.answers[-1]


def test_nothing_of_the_script_runs_at_a_healthy_step(model):
    """A property may draw random numbers."""
    reads = []

    class Batch:
        def __init__(self):
            self.x = torch.randn(6, 4)

        @property
        def noise(self):
            reads.append(1)
            return torch.zeros(6, 4)

    loop = Loop(model)
    for _ in range(5):
        b = Batch()
        loss = model(b.x + b.noise).square().mean()
        loop.backward(loss)
    assert len(reads) == 5 and isinstance(loop.last.batch, Inputs)


def test_no_activation_is_kept_alive(model):
    """Once the loop lets go of its outputs, they are gone, although the step can be run again."""
    loop, alive = Loop(model), []
    for _ in range(5):
        x, y = torch.randn(6, 4), torch.randn(6, 1)
        out = model(x)
        loss = F.mse_loss(out, y)
        loop.backward(loss)
        gone = weakref.ref(out)
        del out, loss
        gc.collect()
        alive.append(gone() is not None)
    assert alive[2:] == [False] * 3
    assert set(loop.last.batch) == {"x", "y"}


def test_a_data_set_is_not_walked_through(model):
    """A list of a thousand tensors is not the batch."""
    data, loop = [torch.randn(4) for _ in range(1000)], Loop(model)
    for i in range(4):
        loss = model(torch.stack([data[j] for j in range(i, i + 6)])).square().mean()
        loop.backward(loss)
    assert isinstance(loop.last.batch, Inputs) and "data" not in loop.last.batch


def test_a_stream_is_not_read_on(model):
    """Running the lines again would take batches from the loop."""

    class Stream:
        def __iter__(self):
            return iter([torch.randn(6, 4)] * 2)

    stream, loop = Stream(), Loop(model)
    for _ in range(4):
        total = torch.zeros(())
        for x in stream:
            total = total + model(x).square().mean()
        loop.backward(total)
    assert not loop.last.whole and "it advances the iterator stream" in loop.last.why_not


def test_a_step_that_the_loop_gave_up_is_not_mixed_with_the_next(model):
    """The variables of the model's first call may be those of a step without a backward."""
    loop = Loop(model)
    for i in range(6):
        x, y = torch.randn(6, 4), torch.randn(6, 1)
        x = model(x)
        if i == 4:
            continue
        loss = F.mse_loss(x, y)
        loop.backward(loss)
    assert [answer.whole for answer in loop.answers] == [True, True, True, True, False]


def test_what_changes_after_it_was_read_is_not_an_input(model):
    """The value from before is gone."""
    loop, state = Loop(model), {"shift": torch.zeros(4)}
    for _ in range(4):
        x = torch.randn(6, 4)
        out = model(x + state["shift"])
        state["shift"] = out.detach().mean().expand(4)
        loss = out.square().mean()
        loop.backward(loss)
    assert not loop.last.whole and "it changes state" in loop.last.why_not


def test_analysis_never_raises(model, monkeypatch):
    """Whatever goes wrong in reading the source is a reason not to run the lines again."""
    from nanproof.explain.lines import _lines

    def broken(*args, **kwargs):
        raise KeyError("no")

    monkeypatch.setattr(_lines, "place_of", broken)
    loop = Loop(model)
    loss = model(torch.randn(6, 4)).square().mean()
    loop.backward(loss)
    assert not loop.last.whole and "KeyError" in loop.last.why_not
    assert isinstance(loop.recorder.lines.at_backward(None), Blocked)


def test_an_exception_of_nanproof_is_not_an_incident_of_the_loop(model):
    """A halted run has one incident at its end, and `raise` for other reasons has none."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    guard = nanproof.Guard(model, optimizer, policy=nanproof.Policy(max_consecutive_skips=1))
    with pytest.raises(nanproof.TrainingHalted), guard:
        for _ in range(5):
            loss = model(torch.full((6, 4), float("nan"))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            guard.step(loss)
    assert [i.kind for i in guard.incidents] == ["nonfinite-loss"] * 2
    with pytest.raises(StopIteration), nanproof.Guard(model, optimizer) as other:
        model(torch.randn(6, 4))
        raise StopIteration
    assert other.incidents == []


@pytest.mark.parametrize("lag", [0, 2])
def test_a_loss_made_in_the_loop_is_explained(model, lag):
    """Also where verdicts come two steps late, with the weights of then."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    with nanproof.Guard(model, optimizer, policy=nanproof.Policy(lag=lag)) as guard:
        for i in range(10):
            x, y = torch.randn(6, 4), torch.rand(6, 1) + 0.1
            if i == 5:
                y[2] = 0
            loss = (model(x).exp() * y.log()).mean()
            optimizer.zero_grad()
            loss.backward()
            guard.step(loss)
    (incident,) = guard.incidents
    found = incident.diagnosis
    assert (incident.step, found.cause, found.samples, found.verified) == (5, "log-of-zero", (2,), True)
    assert found.source.rpartition(":")[0].endswith("test_lines.py")


def test_an_output_in_a_dictionary_from_before_the_step_is_not_run_again(model):
    loop, state = Loop(model), {"w": torch.ones(1)}
    for _ in range(4):
        x = torch.randn(6, 4)
        state["out"] = model(x)
        loss = (state["out"] * state["w"]).square().mean()
        loop.backward(loss)
    assert not loop.last.whole and "was there before this step" in loop.last.why_not


def test_the_rows_of_a_data_set_are_the_batch_not_the_data_set(model):
    loop, data = Loop(model), torch.randn(100, 4)
    for i in range(4):
        rows = torch.arange(i, i + 6)
        x = data[rows] / 2
        loss = model(x).square().mean()
        loop.backward(loss)
    assert set(loop.last.batch) == {"x"}


def test_a_generator_in_an_attribute_is_named(model):
    class Noise:
        def __init__(self):
            self.generator = torch.Generator()

    loop, noise = Loop(model), Noise()
    for _ in range(4):
        x = torch.randn(6, 4)
        loss = (model(x) + torch.randn(6, 1, generator=noise.generator)).square().mean()
        loop.backward(loss)
    assert not loop.last.whole and "noise.generator draws random numbers" in loop.last.why_not


def test_asking_whether_an_output_is_none_is_no_obstacle(model):
    loop = Loop(model)
    for _ in range(4):
        x = torch.randn(6, 4)
        out = model(x)
        loss = out.square().mean() if out is not None else out.sum()
        loop.backward(loss)
    assert loop.last.whole
