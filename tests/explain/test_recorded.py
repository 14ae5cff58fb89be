"""Pins what a recorder knows of a raw loop: the call behind each backward, that calling again gives the same loss bit for bit,
and that it says so where the loss was made outside of the model."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanproof import Policy, UsageError, call_again
from nanproof.explain.lines._recorded import RECORDED, RootRecorder
from nanproof.integrations._protected import UNKNOWN, ProtectedRun


class Net(nn.Module):
    """Returns its loss in the form asked for."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line, self.drop, self.form = nn.Linear(4, 3), nn.Dropout(0.5), form

    def forward(self, x: Tensor, *, labels: Tensor) -> Any:
        logits = self.drop(self.line(x))
        loss = nn.functional.cross_entropy(logits, labels)
        if self.form == "attribute":
            return SimpleNamespace(loss=loss, logits=logits)
        return {"tensor": loss, "key": {"loss": loss, "logits": logits}, "first": (loss, logits), "logits": logits}[self.form]


def loss_in(output: Any, form: str) -> Tensor:
    if form == "logits":
        return output.sum()
    return {"tensor": lambda: output, "key": lambda: output["loss"], "first": lambda: output[0]}.get(form, lambda: output.loss)()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 4, generator=generator), torch.randint(0, 3, (5,), generator=generator)


@pytest.mark.parametrize("form", ["tensor", "key", "first", "attribute"])
@pytest.mark.parametrize(
    "change", [lambda x: x, lambda x: x / 4, lambda x: 0.3 * x, lambda x: x / 3 * 0.7 / 2], ids=["as is", "/4", "*0.3", "chain"]
)
def test_calling_again_gives_the_loss_of_backward_bit_for_bit(form: str, change: Any) -> None:
    """Whatever the model returns and whatever number divides it; the framework's own division comes last."""
    model, told = Net(form), []
    recorder = RootRecorder(model, told.append)
    x, y = batch()
    state = torch.get_rng_state()
    loss = change(loss_in(model(x, labels=y), form))
    assert recorder.recognise(loss, then=[("/", 2.0)])
    assert len(told) == 1
    torch.set_rng_state(state)
    again = recorder.loss_fn(model, told[0])
    assert again.item() == (loss / 2.0).item()
    assert len(told) == 1, "running again is not recorded"
    recorder.close()
    model(x, labels=y)
    assert len(told) == 1


def test_a_loss_made_outside_is_not_recognised() -> None:
    """Cross entropy of the logits, a sum of two calls, another output of the same operation, a sum with something else."""
    model, told = Net("logits"), []
    recorder = RootRecorder(model, told.append)
    x, y = batch()
    assert not recorder.recognise(nn.functional.cross_entropy(model(x, labels=y), y))
    with pytest.raises(UsageError, match="not a recorded call"):
        call_again(model, told[0])
    model.form = "tensor"
    first, second = model(x, labels=y), model(x, labels=y)
    assert not recorder.recognise(first + second)
    assert not recorder.recognise(model(x, labels=y) + 0.1 * model.line.weight.pow(2).sum())
    assert not recorder.recognise(model(x, labels=y) * model.line.bias.exp()[0])
    assert recorder.recognise(model(x, labels=y)), "the next one is"
    assert len(told) == 5, "two calls for one backward are one micro-batch"


def test_evaluation_goes_by_unnoticed() -> None:
    """Neither a forward without gradients nor one in eval mode begins a step; a loop that trains in eval mode is still known."""
    model, told = Net("tensor"), []
    recorder = RootRecorder(model, told.append)
    x, y = batch()
    with torch.no_grad():
        model(x, labels=y)
    model.eval()
    model(x, labels=y)
    model(x, labels=y)
    assert told == []
    model.train()
    assert recorder.recognise(model(x, labels=y))
    assert len(told) == 1
    model.eval()
    other, labels = batch(1)
    assert recorder.recognise(model(other, labels=labels))
    assert len(told) == 2 and told[1]["args"][0] is other


def test_a_copy_of_the_model_is_not_recorded() -> None:
    """A copy for averaging takes the hooks with it, but not the recorder."""
    model, told = Net("tensor"), []
    recorder = RootRecorder(model, told.append)
    copied = copy.deepcopy(model)
    x, y = batch()
    copied(x, labels=y)
    assert told == []
    assert recorder.recognise(model(x, labels=y))


class _Writes(nn.Module):
    """Its loss is its own output; it may write into what it is given."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line, self.writes = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)), writes

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            x.mul_(0.5)
        out: Tensor = self.line(x).square().mean()
        return out


@pytest.mark.parametrize("buffers", [0, 1, 2])
@pytest.mark.parametrize("writes", [False, True])
def test_a_batch_that_is_overwritten_is_kept_as_it_was(buffers: int, writes: bool) -> None:
    """A loop that fills one buffer, or two in turn, for all its batches, and a model that writes into its batch: with late
    verdicts the bad batch leaves no trace and is explained. (Steps behind it were taken with later batches, and the bad one was
    called a fault of the hardware.)"""
    made = []
    for bad in (True, False):
        model = _Writes(writes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        guard = ProtectedRun(policy=Policy(lag=2), loop=RECORDED)
        recorder = RootRecorder(model, lambda batch, guard=guard: guard.engine.begin(batch))
        guard.start(model, optimizer, loss_fn=recorder.loss_fn, max_norm=None)
        batches = torch.randn(12, 4, 8, generator=torch.Generator().manual_seed(1))
        batches[5, 0, 0] = torch.nan
        places = [torch.empty(4, 8) for _ in range(buffers)]
        for i, x in enumerate(batches):
            if i == 5 and not bad:
                continue
            loss = model(places[i % buffers].copy_(x) if buffers else x.clone())
            if not recorder.recognise(loss):
                guard.engine.begin(UNKNOWN)
            guard.engine.loss(loss)
            loss.backward()
            guard.engine.step()
            guard.engine.end()
            optimizer.zero_grad()
        guard.close()
        made.append([p.detach() for p in model.parameters()])
        causes = [(i.step, None if i.diagnosis is None else i.diagnosis.cause) for i in guard.incidents]
        assert causes == ([(5, "nonfinite-batch")] if bad else [])
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
