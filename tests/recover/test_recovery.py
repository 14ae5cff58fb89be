"""Going back: to a copy in memory, to a checkpoint, in a new process; with nothing lost and nothing twice."""

from __future__ import annotations

import io
import math

import pytest
import torch
from torch import nn

import nanproof
from recover.runs import (
    Rows,
    loader,
    made,
    once,
    poison_buffer,
    poison_moment,
    poison_unused_moment,
    poison_weight,
    same,
    train,
    weights,
)
from toys import batches, mse, mse_fp16, net, poison


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("place", ["memory", "disk"])
@pytest.mark.parametrize("harm", [poison_weight, poison_moment, poison_unused_moment, poison_buffer])
def test_a_poisoned_run_ends_as_if_nothing_had_happened(harm, place, lag, tmp_path):
    """Whatever part of the state was written by someone else: it is found, the run goes back, and the data with it."""
    kept = {"snapshot_every": 10} if place == "memory" else {}
    saved = nanproof.Checkpoints(tmp_path, every=10, prove=3) if place == "disk" else None
    undisturbed = made(scheduler=True)
    train(undisturbed, loader(), 60)
    guard = made(scheduler=True, policy={**kept, "lag": lag}, checkpoints=saved)
    data = guard.wrap(loader())
    train(guard, data, 60, once(34, harm))
    guard.sync()
    undisturbed.sync()
    assert same(weights(guard), weights(undisturbed)) == []
    incident = guard.incidents[0]
    assert incident.action == ("rewound" if place == "memory" else "rolled-back")
    assert incident.kind == "nonfinite-weight"
    assert (incident.restored_step, incident.restored_from) == (30, "memory" if place == "memory" else "step-00000030")
    assert (incident.attempt, incident.stepped_over, incident.cap, incident.remedy) == (1, 0, None, None)
    assert [i.action for i in guard.incidents] == [incident.action]
    assert [record.step for record in guard.history] == list(range(60))
    guard.close()
    undisturbed.close()


def test_a_weight_poisoned_right_after_a_bad_batch_is_not_blamed_on_the_data():
    """Two refusals in a row for two reasons: the run goes back at the second, and steps over nothing."""
    data = batches(40)
    data[23] = poison(data[23])
    guard = made(policy={"snapshot_every": 10, "max_consecutive_skips": 2})
    harm = once(24, poison_weight)
    for batch in guard.wrap(data):
        guard.train_step(batch)
        harm(guard)
    undisturbed = made()
    for batch in data:
        undisturbed.train_step(batch)
    assert [(i.step, i.kind, i.action) for i in guard.incidents] == [
        (23, "nonfinite-loss", "skipped"),
        (24, "nonfinite-weight", "rewound"),
        (23, "nonfinite-loss", "skipped"),
    ]
    assert [i.restored_step for i in guard.incidents] == [None, 20, None] and guard.incidents[1].stepped_over == 0
    assert same(weights(guard), weights(undisturbed)) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0])
def test_a_poisoned_loss_scale_is_put_back(value):
    """A scale that is no number refuses every step for ever, as an overflow that only calibrates: it has to be noticed."""

    def run(harm):
        torch.manual_seed(0)
        model = net(dropout=0.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        guard = nanproof.Guard(
            model, optimizer, loss_fn=mse_fp16, scaler=scaler, policy=nanproof.Policy(snapshot_every=5, diagnose="never")
        )
        train(guard, guard.wrap(loader()), 40, once(23, lambda g: scaler._scale.fill_(value)) if harm else None)
        return guard

    disturbed, undisturbed = run(True), run(False)
    assert same(weights(disturbed), weights(undisturbed)) == []
    assert [(i.kind, i.action) for i in disturbed.incidents] == [("loss-scale-collapse", "rewound")]


@pytest.mark.parametrize("optimizer", ["AdamW-fused", "SGD-fused", "Adam-single", "Lion"])
@pytest.mark.parametrize("stop", [41, 60])
def test_a_new_process_goes_on_bit_for_bit(optimizer, stop, tmp_path):
    """Killed anywhere, resumed from the last good checkpoint: the weights at the end are those of a run that was not."""
    whole = made(optimizer, scheduler=True)
    train(whole, loader(), 90)
    where = nanproof.Checkpoints(tmp_path, every=20, prove=5, background=False)
    killed = made(optimizer, scheduler=True, checkpoints=where)
    train(killed, killed.wrap(loader()), stop)
    killed.parts.recovery.close(alone=False)  # what the end of a process does
    torch.manual_seed(999)
    fresh = made(optimizer, scheduler=True, checkpoints=where)
    data = fresh.wrap(loader(seed=12345))
    torch.randn(17)
    assert fresh.resume() == (20 if stop == 41 else 40)
    train(fresh, data, 90)
    assert same(weights(fresh), weights(whole)) == []
    fresh.close()


def test_a_run_without_checkpoints_on_the_disk_starts_at_0(tmp_path):
    guard = made(checkpoints=nanproof.Checkpoints(tmp_path))
    assert guard.resume() == 0
    with pytest.raises(nanproof.UsageError, match="no checkpoints"):
        made().resume()


@pytest.mark.parametrize("lag", [0, 2])
def test_a_loop_of_ones_own_goes_back_and_resumes_too(lag, tmp_path):
    """Its schedule is advanced by the loop, after `guard.step`: going back and resuming both come out right."""

    def build():
        torch.manual_seed(0)
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)

    def loop(guard, data, steps, harm=None):
        while guard.next_step < steps:
            for batch in data:
                guard.optimizer.zero_grad()
                loss = mse(guard.model, batch)
                guard.backward(loss)
                guard.step(loss)
                guard.scheduler.step()
                if harm:
                    harm(guard)
                if guard.next_step >= steps:
                    break

    def guarded(**kwargs):
        model, optimizer, scheduler = build()
        policy = nanproof.Policy(diagnose="never", lag=lag, **kwargs.pop("policy", {}))
        return nanproof.Guard(model, optimizer, scheduler=scheduler, policy=policy, **kwargs)

    undisturbed = guarded()
    loop(undisturbed, loader(), 70)
    rewound = guarded(policy={"snapshot_every": 10})
    loop(rewound, rewound.wrap(loader()), 70, once(34, poison_weight))
    assert same(weights(rewound), weights(undisturbed)) == []
    assert rewound.scheduler.state_dict() == undisturbed.scheduler.state_dict()
    where = nanproof.Checkpoints(tmp_path, every=20, prove=5, background=False)
    killed = guarded(checkpoints=where)
    loop(killed, killed.wrap(loader()), 47)
    killed.parts.recovery.close(alone=False)
    fresh = guarded(checkpoints=where)
    data = fresh.wrap(loader(seed=5))
    assert fresh.resume() == 40
    loop(fresh, data, 70)
    assert same(weights(fresh), weights(undisturbed)) == []
    assert fresh.scheduler.state_dict() == undisturbed.scheduler.state_dict()


def test_at_the_cap_the_run_goes_back_and_steps_over_the_data():
    """A stretch of bad batches: after the cap they are stepped over, with a margin, and the rest is trained on."""
    data = batches(60)
    for i in range(30, 36):
        data[i] = poison(data[i])
    guard = made(policy={"snapshot_every": 10, "max_consecutive_skips": 3, "rollback_margin": 1}, dropout=0.0)
    wrapped = guard.wrap(data)
    for batch in wrapped:
        guard.train_step(batch)
    # Steps 30 to 33 reach the cap; they and 34 are stepped over; 35 is refused as one bad batch.
    oracle = made(dropout=0.0)
    for i in [*range(30), *range(36, 60)]:
        oracle.train_step(data[i])
    mine, wanted = weights(guard), weights(oracle)
    assert same(mine, wanted) == []
    assert [i.action for i in guard.incidents] == ["skipped"] * 3 + ["rewound", "skipped"]
    back = guard.incidents[3]
    assert (back.step, back.restored_step, back.restored_from, back.stepped_over, back.attempt) == (33, 30, "memory", 5, 1)
    assert "skipping 5 batches" in back.outcome


def test_the_same_trouble_again_and_again_halts_the_run():
    """Broken from outside after every step: each try goes back, and after the last one the run is halted."""
    guard = made(policy={"snapshot_every": 5, "max_rollbacks": 2})
    data = guard.wrap(loader())

    def harm(guard):
        if guard.next_step >= 12:
            poison_weight(guard)

    with pytest.raises(nanproof.TrainingHalted, match="came back after 2 rollbacks") as halted:
        train(guard, data, 60, harm)
    assert [(i.action, i.attempt, i.cap) for i in guard.incidents] == [
        ("rewound", 1, None),
        ("rewound", 2, None),
        ("halted", 0, "max_rollbacks"),
    ]
    assert halted.value.incident is guard.incidents[-1] and guard.incidents[-1].cap_count == 2


def test_trouble_that_comes_back_at_the_same_place_is_stepped_over():
    """The first try trains on the same data again; when that breaks the weights again, the data is to blame."""
    data = batches(50)
    guard = made(policy={"snapshot_every": 10, "rollback_margin": 0}, dropout=0.0)

    def harm(batch):
        if torch.equal(batch[0], data[23][0]):
            poison_weight(guard)

    for batch in guard.wrap(data):
        guard.train_step(batch)
        harm(batch)
    assert [i.action for i in guard.incidents] == ["rewound", "rewound"]
    assert [(i.attempt, i.stepped_over) for i in guard.incidents] == [(1, 0), (2, 2)]
    assert all(torch.isfinite(t).all() for t in guard.model.parameters())


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_two_troubles_soon_after_each_other_cost_no_data(place, tmp_path):
    """The second is within the steps in which trouble counts as the same, but past the step that broke first: the data it was
    trained on again did no harm, so none is stepped over, and the run ends as if nothing had happened."""
    kept = {"snapshot_every": 10} if place == "memory" else {}
    saved = nanproof.Checkpoints(tmp_path, every=10, prove=3) if place == "disk" else None
    undisturbed = made()
    train(undisturbed, loader(), 60)
    guard = made(policy=kept, checkpoints=saved)
    first, second = once(24, poison_weight), once(47, poison_weight)

    def harm(guard):
        first(guard)
        second(guard)

    train(guard, guard.wrap(loader()), 60, harm)
    assert [(i.step, i.attempt, i.stepped_over) for i in guard.incidents] == [(24, 1, 0), (47, 2, 0)]
    assert "(attempt 2)" in guard.incidents[1].outcome
    assert same(weights(guard), weights(undisturbed)) == []
    guard.close()
    undisturbed.close()


@pytest.mark.parametrize("why", ["no state was kept", "none may be used"])
def test_without_a_state_to_go_back_to_the_cap_halts(why):
    """Also where the weights are broken: nobody claims to have gone anywhere."""
    kept = {"snapshot_every": 2, "max_rollbacks": 0} if why == "none may be used" else {}
    guard = made(policy={"max_consecutive_skips": 6, **kept})
    with pytest.raises(nanproof.TrainingHalted, match="7 steps in a row were refused") as halted:
        for i, batch in enumerate(batches(20)):
            if i == 5:
                poison_weight(guard)
            guard.train_step(batch)
    assert (halted.value.incident.cap, halted.value.incident.cap_count) == ("max_consecutive_skips", 7)
    assert [i.action for i in guard.incidents] == ["skipped"] * 6 + ["halted"]
    assert all(i.restored_step is None and i.restored_from is None for i in guard.incidents)
    assert "good state" not in str(halted.value)  # there is no telling that one would have helped


def test_a_state_that_cannot_be_copied_does_not_end_the_run(monkeypatch, caplog):
    guard = made(policy={"snapshot_every": 5})
    monkeypatch.setattr(guard.parts.recovery.snapshots, "take", lambda *_: 1 / 0)
    train(guard, loader(), 12)
    assert guard.next_step == 12 and guard.parts.recovery.snapshots.kept == []
    assert caplog.text.count("cannot be copied") == 1


def test_divergence_sends_the_run_back_and_can_be_told_not_to():
    """The loss grows without end after the learning rate was raised by hand; going back puts the rate back too."""

    def run(**policy):
        torch.manual_seed(0)
        model = nn.Linear(6, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        policy = nanproof.Policy(snapshot_every=20, diagnose="never", **policy)
        guard = nanproof.Guard(model, optimizer, loss_fn=mse, max_norm=None, policy=policy)

        def harm(guard):
            for group in guard.optimizer.param_groups:
                group["lr"] = 2.0

        train(guard, guard.wrap(loader(Rows(800))), 120, once(50, harm))
        return guard

    back = run()
    actions = {(i.kind, i.action) for i in back.incidents}
    assert ("divergence", "rewound") in actions, back.incidents
    first = next(i for i in back.incidents if i.kind == "divergence")
    assert first.restored_step == 40 and first.stepped_over > 0
    assert back.history[-1].loss < 1 and back.optimizer.param_groups[0]["lr"] == 0.02
    only_told = run(on_divergence="record")
    assert [i.action for i in only_told.incidents if i.kind == "divergence"] == ["recorded"]
    # The cap comes later, and the state it goes back to is still the one of before.
    assert 40 in [i.restored_step for i in only_told.incidents if i.action == "rewound"]
    assert only_told.history[-1].loss < 1


def test_after_going_back_the_learning_rate_can_climb_again():
    guard = made(policy={"snapshot_every": 10, "rewarm_steps": 4})
    train(guard, guard.wrap(loader()), 40, once(23, poison_weight))
    rates = [r.lr[0] for r in guard.history]
    assert rates[:20] == [1e-2] * 20
    assert rates[20:26] == pytest.approx([0.002, 0.004, 0.006, 0.008, 0.01, 0.01])
    assert guard.optimizer.param_groups[0]["lr"] == 1e-2


def test_without_a_wrapped_loader_the_data_goes_on():
    """No position is known: weights go back, the data does not, and random numbers are not dealt twice."""
    data = batches(60)
    guard = made(policy={"snapshot_every": 10})
    seen = []
    for batch in data:
        if guard.next_step == 23 and not guard.incidents:
            poison_weight(guard)
        guard.train_step(batch)
        seen.append(guard.next_step)
    assert guard.incidents[0].action == "rewound"
    assert seen[22:26] == [23, 20, 21, 22] and len(seen) == 60


@pytest.mark.parametrize("every", [1, 2, 5, 10])
def test_copies_are_not_pushed_out_while_the_run_stands_still(every):
    """Many bad batches in a row: however often copies are made, one from before them is there to go back to."""
    data = [(x, y) for x, y in loader(Rows(count=400))]
    for batch in data[20:32]:
        batch[0][:] = math.nan
    guard = made(policy={"snapshot_every": every, "max_consecutive_skips": 9})
    with guard:
        for batch in data:
            guard.train_step(batch)
    assert [i.action for i in guard.incidents].count("rewound") == 1


def test_snapshots_cost_no_step_and_change_nothing():
    """A run that keeps copies is bit for bit the run that does not."""
    plain = made()
    train(plain, loader(), 50)
    kept = made(policy={"snapshot_every": 3})
    train(kept, loader(), 50)
    assert same(weights(plain), weights(kept)) == []
    assert [s.step for s in kept.parts.recovery.snapshots.kept] == [45, 48]


def test_what_nothing_trains_is_copied_once():
    """Frozen weights are shared by the copies, and copied again when someone writes them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 1))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model[2].parameters(), lr=1e-2)
    guard = nanproof.Guard(model, optimizer, loss_fn=mse, policy=nanproof.Policy(snapshot_every=2, diagnose="never"))
    data = batches(12)
    for batch in data[:4]:
        guard.train_step(batch)
    first, second = guard.parts.recovery.snapshots.kept
    assert first.copies["model.0.weight"] is second.copies["model.0.weight"]
    with torch.no_grad():
        model[0].weight.mul_(2)
    for batch in data[4:6]:
        guard.train_step(batch)
    third = guard.parts.recovery.snapshots.kept[-1]
    assert torch.equal(third.copies["model.0.weight"], model[0].weight)
    assert not torch.equal(third.copies["model.0.weight"], first.copies["model.0.weight"])


def test_memory_is_stated_before_it_is_taken(caplog):
    caplog.set_level("INFO", logger="nanproof")
    guard = made(policy={"snapshot_every": 5})
    train(guard, loader(), 30)
    said = [r.message for r in caplog.records if "copy of the run's state takes" in r.message]
    # Once for the state of the beginning, once with the optimizer's.
    assert len(said) == 2 and all("MB on cpu; up to 3 are held" in text for text in said)


def test_a_run_that_goes_wrong_at_once_goes_back_to_its_beginning():
    """Before the first copy is due there is the state the run began with."""
    undisturbed = made()
    train(undisturbed, loader(), 30)
    guard = made(policy={"snapshot_every": 20})
    train(guard, guard.wrap(loader()), 30, once(3, poison_weight))
    assert same(weights(guard), weights(undisturbed)) == []
    assert [(i.step, i.action, i.restored_step) for i in guard.incidents] == [(3, "rewound", 0)]


def test_a_copy_that_does_not_fit_is_not_taken(monkeypatch, caplog):
    said = "MemTotal: 9999 kB\nMemAvailable: 1 kB\n"
    monkeypatch.setattr("nanproof.recover.state._snapshots.open", lambda path: io.StringIO(said), raising=False)
    guard = made(policy={"snapshot_every": 5})
    train(guard, loader(), 12)
    assert guard.parts.recovery.snapshots.kept == []
    assert "no copy of the run's state is taken" in caplog.text


def test_every_further_try_goes_back_to_an_older_state():
    guard = made(policy={"snapshot_every": 10})
    data = guard.wrap(loader())

    def harm(guard):
        if guard.next_step == 35:
            poison_weight(guard)

    with pytest.raises(nanproof.TrainingHalted):
        train(guard, data, 60, harm)
    assert [(i.action, i.restored_step, i.attempt) for i in guard.incidents] == [
        ("rewound", 30, 1),
        ("rewound", 20, 2),
        ("rewound", 20, 3),
        ("halted", None, 0),
    ]
    assert (guard.incidents[-1].cap, guard.incidents[-1].cap_count) == ("max_rollbacks", 3)


@pytest.mark.parametrize("how", ["no_grad", "data", "assign"])
def test_a_teacher_that_follows_its_student_is_part_of_the_state(how, tmp_path):
    """Frozen, and written in whatever way between steps."""

    def build(**kwargs):
        torch.manual_seed(0)
        model = nn.ModuleDict({"q": net(0.0), "k": net(0.0)})
        model["k"].requires_grad_(False)
        optimizer = torch.optim.AdamW(model["q"].parameters(), lr=1e-2)
        return nanproof.Guard(
            model, optimizer, loss_fn=lambda m, b: mse(m["q"], b) + 0.1 * (m["q"](b[0]) - m["k"](b[0])).square().mean(), **kwargs
        )

    def follow(guard):
        for q, k in zip(guard.model["q"].parameters(), guard.model["k"].parameters(), strict=True):
            if how == "no_grad":
                with torch.no_grad():
                    k.mul_(0.9).add_(q, alpha=0.1)
            elif how == "data":
                k.data.mul_(0.9).add_(q.data, alpha=0.1)
            else:
                k.data = 0.9 * k.data + 0.1 * q.data

    def run(guard, data, until):
        for batch in data[guard.next_step : until]:
            follow(guard)
            guard.train_step(batch)

    data = batches(30)
    whole = build()
    run(whole, data, 30)
    where = nanproof.Checkpoints(tmp_path, every=5, prove=1, background=False)
    killed = build(checkpoints=where)
    run(killed, data, 17)
    killed.parts.recovery.close(alone=False)
    fresh = build(checkpoints=where)
    assert fresh.resume() == 15
    run(fresh, data, 30)
    assert same(weights(fresh), weights(whole)) == []


def test_optimizer_state_that_came_later_goes_again():
    """Going back to the beginning: an optimizer that fills its state at the first step, with plain numbers, fills it again."""

    class Plain(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 1e-2, "seen": []})

        @torch.no_grad()
        def step(self, closure=None):
            self.state["all"]["count"] = self.state["all"].get("count", 0) + 1
            for group in self.param_groups:
                group["seen"].append(1)
                for p in group["params"]:
                    state = self.state[p]
                    if not state:
                        state["step"], state["avg"] = 0, torch.zeros_like(p)
                    state["step"] += 1
                    state["avg"].lerp_(p.grad, 0.1)
                    p.sub_(state["avg"], alpha=group["lr"] / state["step"])

    def run(harm):
        torch.manual_seed(0)
        model = net()
        guard = nanproof.Guard(
            model, Plain(model.parameters()), loss_fn=mse, policy=nanproof.Policy(snapshot_every=8, diagnose="never")
        )
        train(guard, guard.wrap(loader()), 20, once(harm, poison_weight))
        return guard

    undisturbed = run(99)
    for at in (5, 13):
        guard = run(at)
        assert len(guard.incidents) == 1
        assert same(weights(guard), weights(undisturbed)) == []
        assert guard.optimizer.param_groups[0]["seen"] == undisturbed.optimizer.param_groups[0]["seen"]
        assert guard.optimizer.state["all"] == undisturbed.optimizer.state["all"] == {"count": 20}


def test_a_loss_scale_goes_back_to_its_beginning():
    def run(harm):
        torch.manual_seed(0)
        model = net(dropout=0.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        policy = nanproof.Policy(snapshot_every=20, diagnose="never")
        guard = nanproof.Guard(model, optimizer, loss_fn=mse_fp16, scaler=scaler, policy=policy)
        train(guard, guard.wrap(loader()), 12, once(4, lambda g: scaler._scale.fill_(math.inf)) if harm else None)
        return guard

    disturbed = run(True)
    assert len(disturbed.incidents) == 1 and same(weights(disturbed), weights(run(False))) == []


def test_buffers_that_change_their_shape_are_put_back():
    """A memory that grows, and one that is made by the first forward."""

    class Remembers(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 1)
            self.register_buffer("memory", torch.zeros(1))
            self.register_buffer("late", None)

        def forward(self, x):
            if self.training:
                self.late = x.mean().detach().reshape(1) if self.late is None else self.late * 0.9
                if len(self.memory) < 12:
                    self.memory = torch.cat([self.memory, x.mean().detach().reshape(1)])
            return self.inner(x) + self.memory.mean() * 0.1 + self.late * 0.1

    def run(harm, **policy):
        torch.manual_seed(0)
        model = Remembers()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        policy = nanproof.Policy(snapshot_every=4, diagnose="never", **policy)
        guard = nanproof.Guard(model, optimizer, loss_fn=mse, policy=policy)

        def poison(guard):
            with torch.no_grad():
                model.memory.fill_(math.nan)
                model.inner.weight.fill_(math.nan)

        train(guard, guard.wrap(loader()), 20, once(harm, poison))
        return guard

    undisturbed = run(99)
    for at in (6, 15):
        guard = run(at)
        assert [i.action for i in guard.incidents] == ["rewound"]
        assert same(weights(guard), weights(undisturbed)) == []


def test_a_rate_that_climbs_goes_on_climbing_after_a_resume(tmp_path):
    def build():
        where = nanproof.Checkpoints(tmp_path, every=5, prove=1, background=False)
        return made(checkpoints=where, policy={"rewarm_steps": 20})

    guard = build()
    train(guard, guard.wrap(loader()), 19, once(12, poison_weight))
    guard.parts.recovery.close(alone=False)
    fresh = build()
    data = fresh.wrap(loader())
    assert fresh.resume() == 15
    train(fresh, data, 19)
    climbed = {r.step: r.lr for r in guard.history}
    assert all(climbed[r.step] == r.lr for r in fresh.history) and fresh.history[-1].lr[0] < 1e-2


@pytest.mark.parametrize("lag", [0, 2])
def test_data_made_from_random_numbers_does_not_come_twice(lag):
    """No wrapped loader: generators stay where the user's code left them."""
    guard = made(policy={"snapshot_every": 5, "lag": lag}, dropout=0.0)
    seen = []
    for i in range(30):
        x = torch.randn(8, 6)
        seen.append(x)
        if i == 13:
            poison_weight(guard)
        guard.train_step([x, x.sum(1)])
    guard.sync()
    assert guard.incidents[0].action == "rewound"
    assert len({tuple(x.flatten().tolist()) for x in seen}) == 30


def test_a_rollback_found_after_the_loop_leaves_the_schedule_right():
    """In a loop of the user's own, with a lag: `sync` finds it after `scheduler.step()`."""
    torch.manual_seed(0)
    model = net(dropout=0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    policy = nanproof.Policy(snapshot_every=10, lag=2, diagnose="never")
    guard = nanproof.Guard(model, optimizer, scheduler=scheduler, policy=policy)
    for i, batch in enumerate(guard.wrap(batches(15))):
        if i == 14:
            poison_weight(guard)
        optimizer.zero_grad()
        loss = mse(model, batch)
        guard.backward(loss)
        guard.step(loss)
        scheduler.step()
    guard.sync()
    assert guard.next_step == 10 and scheduler.last_epoch == 10


def test_nothing_is_promoted_while_a_jump_is_watched(tmp_path):
    """Not even by a copy that was made before the jump and is written during it."""
    where = nanproof.Checkpoints(tmp_path, every=10, prove=9, background=False)
    guard = made(checkpoints=where, policy={"lag": 2})
    train(guard, guard.wrap(loader()), 20)  # the copy of step 20 waits for its verdicts; step 10 has 8 healthy steps
    recovery = guard.parts.recovery

    def good():
        return [path.parent.name for path in tmp_path.glob("step-*/good.json")]

    recovery.accepted(18, settled=False)
    assert (tmp_path / "step-00000010").is_dir() and not (tmp_path / "step-00000020").exists()
    recovery.accepted(19, settled=False)
    assert (tmp_path / "step-00000020").is_dir() and good() == []
    recovery.accepted(20, settled=True)
    assert good() == ["step-00000010"]
    recovery.close(alone=False)


def test_after_going_back_copies_are_made_again():
    """Back at step 20, the copy of step 30 is gone with the way it was on: it is due once more."""
    guard = made(policy={"snapshot_every": 10, "rollback_margin": 0})
    times = []

    def harm(guard):
        if guard.next_step == 35 and len(times) < 2:
            times.append(35)
            poison_weight(guard)

    train(guard, guard.wrap(loader()), 38, harm)
    assert [i.action for i in guard.incidents] == ["rewound", "rewound"]
    assert [s.step for s in guard.parts.recovery.snapshots.kept] == [20, 30]
