"""Several optimizers in the loops of Accelerate, Fabric and Lightning's manual optimization. Those that one loss feeds take one
step, all or none; those with a backward of their own keep their own verdicts."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import nanproof
from integrations.lightning_toys import LIGHTNINGS_OWN_WARNINGS
from nanproof import read_steps
from nanproof.core.support._index import read_index
from nanproof.integrations._groups import Group, leaves_of

STEPS, BAD = 8, 4
pytestmark = LIGHTNINGS_OWN_WARNINGS


class Pair(nn.Module):
    """A generator and a critic; or simply two halves of one model."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)


class Loop:
    """What a loop needs of its framework."""

    def __init__(self, model, optimizers, backward, clip):
        self.model, self.optimizers, self.backward, self.clip = model, optimizers, backward, clip


def data(step):
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def one_loss(loop, step, mode, culprit):
    """`culprit`: the parameter whose gradient is NaN, though the loss is finite."""
    if mode == "never" and step == BAD:
        return
    model = loop.model
    loss = model.second(torch.tanh(model.first(data(step)))).square().mean()
    if mode == "bad" and step == BAD:
        loss = loss + (model.get_parameter(culprit) * 0).sqrt().sum()
    for optimizer in loop.optimizers:
        optimizer.zero_grad()
    loop.backward(loss)
    for optimizer in loop.optimizers:
        loop.clip(optimizer, 0.3)
        optimizer.step()


def gan(loop, step, mode, culprit):
    """`culprit`: whose batch is bad, and which of them is first."""
    who, first = culprit
    for turn in ("second", "first") if first == "second" else ("first", "second"):
        if turn == who and step == BAD and mode == "never":
            continue
        model, optimizer = loop.model, loop.optimizers[turn == "second"]
        x = data(step) * (math.nan if turn == who and step == BAD and mode == "bad" else 1)
        optimizer.zero_grad()
        if turn == "second":
            loop.backward(model.second(model.first(data(step + 100)).detach()).mean() - model.second(x).mean())
        else:
            loop.backward(-model.second(model.first(x)).mean())
        optimizer.step()


def accelerate(work, mode, culprit, folder):
    pytest.importorskip("accelerate.accelerator")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState

    try:
        accelerator, model = Accelerator(cpu=True), Pair()
        made = optimizers_of(model)
        model, *made = accelerator.prepare(model, *made)
        guard = nanproof.protect(accelerator, run_dir=folder)
        parameters = {id(o): [p for g in o.param_groups for p in g["params"]] for o in made}
        loop = Loop(model, made, accelerator.backward, lambda o, n: accelerator.clip_grad_norm_(parameters[id(o)], n))
        for step in range(STEPS):
            work(loop, step, mode, culprit)
        guard.close()
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
    return model, guard


def fabric(work, mode, culprit, folder):
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    guard = nanproof.protect(fabric, run_dir=folder)
    plain = Pair()
    model, *made = fabric.setup(plain, *optimizers_of(plain))
    loop = Loop(plain, made, fabric.backward, lambda o, n: fabric.clip_gradients(model, o, max_norm=n, error_if_nonfinite=False))
    for step in range(STEPS):
        work(loop, step, mode, culprit)
    guard.close()
    return plain, guard


def lightning(work, mode, culprit, folder):
    L = pytest.importorskip("lightning.pytorch")

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization, self.pair = False, Pair()

        def training_step(self, batch, index):
            loop = Loop(self.pair, self.optimizers(), self.manual_backward, self.clip_gradients)
            work(loop, index, mode, culprit)

        def configure_optimizers(self):
            return optimizers_of(self.pair)

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    trainer = L.Trainer(max_epochs=1, accelerator="cpu", **quiet)
    guard = nanproof.protect(trainer, run_dir=folder)
    module = Module()
    trainer.fit(module, torch.utils.data.DataLoader(range(STEPS)))
    return module.pair, guard


def optimizers_of(model):
    torch.manual_seed(0)
    for p in model.parameters():
        nn.init.normal_(p, std=0.5)
    return torch.optim.AdamW(model.first.parameters(), 1e-2), torch.optim.RMSprop(model.second.parameters(), 1e-2)


def weights(model):
    return [p.detach().clone() for p in model.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(weights(a), weights(b), strict=True))


LOOPS = [accelerate, fabric, lightning]


@pytest.mark.parametrize("culprit", ["first.weight", "second.weight"])
@pytest.mark.parametrize("framework", LOOPS)
def test_one_loss_is_one_step(framework, culprit, tmp_path):
    """The weights are those of the run without the batch; one record a step, one incident, one folder."""
    never, _ = framework(one_loss, "never", culprit, None)
    model, guard = framework(one_loss, "bad", culprit, tmp_path / "run")
    assert same(model, never)
    (incident,) = guard.incidents
    assert (incident.step, incident.action) == (BAD, "skipped")
    assert [name.removeprefix("pair.") for name, _ in incident.culprits] == [culprit]
    assert [r.step for r in guard.history] == [r.step for r in read_steps(tmp_path / "run")] == list(range(STEPS))
    assert not list((tmp_path / "run").glob("optimizer*"))


@pytest.mark.parametrize("first", ["first", "second"])
@pytest.mark.parametrize("who", ["first", "second"])
@pytest.mark.parametrize("framework", LOOPS)
def test_a_backward_of_its_own_is_a_verdict_of_its_own(framework, who, first, tmp_path):
    """A bad batch of one leaves no trace, and the other takes its step."""
    never, _ = framework(gan, "never", (who, first), None)
    model, guard = framework(gan, "bad", (who, first), tmp_path / "run")
    assert same(model, never)
    assert [(i.step, i.action) for i in guard.incidents] == [(BAD, "skipped")]
    folders = [tmp_path / "run", tmp_path / "run" / "optimizer-2"]
    assert [[r.step for r in read_steps(folder)] for folder in folders] == [list(range(STEPS))] * 2
    assert [folder for folder, _ in read_index(tmp_path / "run")] == folders


def test_leaves_of_a_graph():
    a, b, c = (torch.ones(2, requires_grad=True) for _ in range(3))
    assert leaves_of((a * b).sum() + a.sum()) == {id(a), id(b)}
    assert leaves_of([a, (c * 2).sum()]) == {id(a), id(c)}
    assert leaves_of((a.detach() * b).sum()) == {id(b)}


class TestWhoIsApart:
    """By the order of the calls, and by whom the backwards reach."""

    def group(self):
        self.parts = [nn.Linear(1, 1) for _ in range(2)]
        self.a, self.b = optimizers = [torch.optim.SGD(part.parameters(), 0.1) for part in self.parts]
        self.backwards = 0
        return Group(optimizers)

    def step(self, group, *optimizers, feeds=(0, 1)):
        """A backward, then these step. Returns those that were found to be apart."""
        group.feed({id(p) for i in feeds for p in self.parts[i].parameters()})
        self.backwards += 1
        found = []
        for optimizer in optimizers:
            if not group.goes_on(optimizer, self.backwards):
                found += group.apart(optimizer)
                group.leave_out(self.backwards)
            group.pass_by(optimizer)
        return found

    def test_those_that_step_together_stay_together(self):
        group = self.group()
        assert self.step(group, self.a) == [] and self.step(group, self.a) == [] and group.undecided
        assert self.step(group, self.b, self.a) == [] and not group.undecided
        assert self.step(group, self.a) == self.step(group, self.b, feeds=(1,)) == []

    def test_one_with_a_backward_of_its_own_is_apart(self):
        group = self.group()
        assert self.step(group, self.a) == []
        assert self.step(group, self.b, feeds=(1,)) == [self.b]

    def test_those_that_take_turns_are_apart(self):
        group = self.group()
        assert self.step(group, self.a) == self.step(group, self.b) == []
        assert self.step(group, self.a) == [self.b]


def test_a_resumed_fit_of_lightning_goes_on(tmp_path):
    """Which optimizers step together shows at the first backward; only then does the guard take its state from the checkpoint."""
    L = pytest.importorskip("lightning.pytorch")

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization, self.pair = False, Pair()

        def training_step(self, batch, index):
            one_loss(Loop(self.pair, self.optimizers(), self.manual_backward, lambda *_: None), index, "bad", "second.bias")

        def configure_optimizers(self):
            return optimizers_of(self.pair)

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False, "enable_checkpointing": False}
    numbers = []
    for epochs, path in ((1, None), (2, tmp_path / "last.ckpt")):
        trainer = L.Trainer(max_epochs=epochs, accelerator="cpu", default_root_dir=tmp_path, **quiet)
        guard = nanproof.protect(trainer)
        trainer.fit(Module(), torch.utils.data.DataLoader(range(STEPS)), ckpt_path=path, weights_only=False)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        numbers.append([record.step for record in guard.history])
        assert guard.refused_in_all == epochs, "also those of before"
    assert numbers == [list(range(STEPS)), list(range(STEPS, 2 * STEPS))]
