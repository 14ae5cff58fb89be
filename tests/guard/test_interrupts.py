"""Ctrl-C at any moment leaves a whole state. `make interrupts` presses it 2,000 times."""

import logging

import pytest
import torch

import nanproof
from toys import batches, mse, net, poison
from zoo.interrupts import KINDS, Reference, campaign, counting, trial


@pytest.fixture(autouse=True)
def _quiet():
    logger = logging.getLogger("nanproof")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


@pytest.mark.filterwarnings("ignore")
def test_interrupts_leave_a_whole_state_behind():
    found = campaign(len(KINDS) * 2, seed=11)
    assert found["interrupts"] == found["whole"] == len(KINDS) * 2, found["problems"]


@pytest.mark.parametrize("name", ["healthy", "refused"])
def test_any_line_of_a_step_can_be_interrupted(name):
    kind = next(kind for kind in KINDS if kind.name == name)
    reference = Reference.of(kind)
    lines = reference.lines[2]
    for line in range(3, lines, 40):
        outcome = trial(kind, reference, target=2, share=line / lines, by_line=True)
        assert outcome.struck and outcome.problem == "", (line, outcome)


def test_an_interrupted_diagnosis_ends_early_and_the_step_has_its_incident():
    runs = []

    def loss_fn(model, batch):
        runs.append(1)
        return mse(model, batch)

    model = net()
    policy = nanproof.Policy(diagnose="always")
    guard = nanproof.Guard(model, torch.optim.AdamW(model.parameters()), loss_fn=loss_fn, policy=policy)
    good, bad = batches(1)[0], poison(batches(1)[0])
    guard.train_step(good)
    runs.clear()
    with counting() as count:
        guard.train_step(bad)
    whole, runs[:] = len(runs), []
    with pytest.raises(KeyboardInterrupt), counting(count[0] // 2):
        guard.train_step(bad)
    assert 1 < len(runs) < whole
    assert [i.step for i in guard.incidents] == [1, 2]
    assert guard.incidents[0].diagnosis.samples == (2,)
    assert guard.next_step == 3


def test_diagnose_leaves_the_model_as_it_was():
    model = net()
    batch = poison(batches(1)[0])
    before = {name: t.clone() for name, t in model.state_dict().items()}
    with counting() as count:
        nanproof.diagnose(model, mse, batch)
    for part in range(1, 8):
        with pytest.raises(KeyboardInterrupt), counting(count[0] * part // 8):
            nanproof.diagnose(model, mse, batch)
        assert all(p.requires_grad for p in model.parameters()) and torch.is_grad_enabled()
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
