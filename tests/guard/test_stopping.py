"""When training stops: skip caps halt it, and after an exception or an interrupt it can go on."""

from __future__ import annotations

import copy

import pytest
import torch

import nanproof
from guard.guarding import guarded
from toys import Run, batches, finite, mse, net, poison, whole_state


@pytest.mark.parametrize("lag", [0, 2])
def test_too_many_refusals_in_a_row_halt_with_the_incident(lag):
    guard = guarded(policy=nanproof.Policy(max_consecutive_skips=3, lag=lag))
    bad = poison(batches(1)[0])
    with pytest.raises(nanproof.TrainingHalted, match="4 steps in a row were refused") as halted:
        for _ in range(10):
            guard.train_step(bad)
    incident = halted.value.incident
    assert (incident.step, incident.action) == (3, "halted")
    assert (incident.cap, incident.cap_count) == ("max_consecutive_skips", 4)
    assert [i.action for i in guard.incidents] == ["skipped"] * 3 + ["halted"]


def test_too_high_a_rate_of_refusals_halts():
    guard = guarded(policy=nanproof.Policy(max_skip_rate=0.1, skip_window=20))
    with pytest.raises(nanproof.TrainingHalted, match="3 of the last steps were refused") as halted:
        for i, batch in enumerate(batches(20)):
            guard.train_step(poison(batch) if i % 3 == 0 else batch)
    incident = halted.value.incident
    assert (incident.step, incident.action) == (6, "halted") and incident is guard.incidents[-1]
    assert (incident.cap, incident.cap_count) == ("max_skip_rate", 3)


def test_an_accepted_step_resets_the_count_in_a_row():
    guard = guarded(policy=nanproof.Policy(max_consecutive_skips=1))
    for i, batch in enumerate(batches(10)):
        guard.train_step(poison(batch) if i % 2 else batch)
    assert len(guard.incidents) == 5


def test_close_after_a_halt_does_not_raise():
    guard = guarded(policy=nanproof.Policy(max_consecutive_skips=0, lag=2))
    guard.train_step(poison(batches(1)[0]))
    guard.close()
    assert guard.incidents[0].action == "halted" and guard.incidents[0].cap == "max_consecutive_skips"


def test_an_exception_inside_a_step_leaves_an_incident_and_a_note():
    def fail(model, batch):
        raise RuntimeError("probability tensor contains inf")

    guard = guarded(loss_fn=fail)
    with pytest.raises(RuntimeError, match="probability tensor") as raised:
        guard.train_step(batches(1)[0])
    assert guard.incidents[0].kind == "exception" and "probability tensor" in guard.incidents[0].message
    assert any("training step 0" in note for note in getattr(raised.value, "__notes__", ["training step 0"]))


@pytest.mark.parametrize("lag", [0, 2])
def test_training_can_go_on_after_an_exception(lag):
    """The batch that raised leaves no trace in weights, moments or buffers, even if an earlier bad one is still under way."""

    def fail_late(model, batch):
        loss = mse(model, batch)
        if len(batch) > 2:
            raise RuntimeError("out of memory")
        return loss

    def run(disturbed):
        torch.manual_seed(0)
        model = net(dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        with guarded(model, optimizer, loss_fn=fail_late, policy=nanproof.Policy(lag=lag)) as guard:
            for i, batch in enumerate(batches(10)):
                if i in (4, 5) and disturbed:
                    if i == 4:
                        guard.train_step(poison(batch))
                    else:
                        with pytest.raises(RuntimeError, match="out of memory"):
                            guard.train_step([*batch, True])
                elif i not in (4, 5):
                    guard.train_step(batch)
        return Run(guard, whole_state(model, optimizer))

    disturbed, oracle = run(True), run(False)
    assert {i.kind for i in disturbed.guard.incidents} == {"nonfinite-loss", "exception"}
    assert disturbed.same_as(oracle) == []


@pytest.mark.parametrize("where", ["reading", "explaining", "held"])
def test_an_interrupt_at_the_wrong_moment_does_not_stop_the_learning(where, monkeypatch):
    """Ctrl-C while the host reads a verdict, looks into a bad step, or trains on a held batch: training goes on afterwards."""
    model = net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    armed = {"on": False}

    def loss_fn(model, batch):
        if armed["on"] and where == "held" and not torch.equal(batch[0], data[6][0]):
            armed["on"] = False
            raise KeyboardInterrupt
        return mse(model, batch)

    guard = guarded(model, optimizer, loss_fn=loss_fn, policy=nanproof.Policy(lag=2))
    data = batches(12)
    data[4] = poison(data[4])
    for batch in data[:6]:
        guard.train_step(batch)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        armed["on"] = True
        if where != "held":

            def interrupt(*_):
                raise KeyboardInterrupt

            patch.setattr(
                {"reading": "nanproof.core.judge._verdict.Reading.of", "explaining": "nanproof.core._inquest.Inquest.hold"}[
                    where
                ],
                interrupt,
            )
        guard.train_step(data[6])
    armed["on"] = False
    before = copy.deepcopy(model.state_dict())
    for batch in data[7:]:
        guard.train_step(batch)
    guard.close()
    assert not torch.equal(before["0.weight"], model.state_dict()["0.weight"])
    assert finite(model, optimizer) and {r.step for r in guard.history} >= {3, 4, 7, 8, 9, 10, 11}
