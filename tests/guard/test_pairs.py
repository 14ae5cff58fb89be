"""The oracle over pairs of optimizers: a fault in one of them leaves no trace in either, whatever the two are."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice, product
from typing import Any

import pytest
import torch
from torch import nn

import nanproof
from crosses import part_of
from guard.pairs import (
    HARMS,
    NAMES,
    PAIRS,
    RATE,
    TOWERS,
    Container,
    Lookahead,
    Towers,
    build,
    inside,
    loss_fn,
    poison_weight,
    rate_groups,
    schedules,
    step_batches,
    unreachable,
    whole,
)
from toys import Lion, differences

STEPS = 10
BAD = 5
DRIVES = ("train_step", "accumulated", "late", "own loop", "own loop accumulated")
SCHEDULES = ("no schedule", "one schedule", "two schedules")


@dataclass
class Run:
    guard: nanproof.Guard
    state: dict[str, Any]

    def same_as(self, other: Run) -> list[str]:
        return list(differences("", self.state, other.state))


class Loop:
    """A model, its pair of optimizers, schedulers and guard, and the loop that drives them."""

    def __init__(self, pair, drive="train_step", schedule="no schedule", seed=0, policy=None, max_norm=1.0, **options):
        torch.manual_seed(seed)
        self.own = drive.startswith("own")
        self.accumulated = drive.endswith("accumulated")
        self.model = Towers(pair, dropout=0.0 if self.own else 0.2)
        self.optimizers = build(pair, self.model)
        self.schedulers = schedules(schedule, self.optimizers)
        given = {"lag": 2 if drive == "late" else 0, "diagnose": "never", **(policy or {})}
        self.guard = nanproof.Guard(
            self.model,
            self.optimizers,
            loss_fn=None if self.own else loss_fn,
            scheduler=(self.schedulers if schedule == "two schedules" else self.schedulers[0]) if self.schedulers else None,
            max_norm=max_norm(*self.optimizers) if callable(max_norm) else max_norm,
            policy=nanproof.Policy(**given),
            **options,
        )

    def step(self, micro):
        if not self.own:
            self.guard.train_step(*micro)
            return
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        if self.accumulated:
            for batch in micro:
                self.guard.backward(loss_fn(self.model, batch) / len(micro))
            self.guard.step()
        else:
            loss = loss_fn(self.model, micro[0])
            loss.backward()
            self.guard.step(loss)
        if self.guard.history[-1].action != "skipped":  # in your own loop the schedule is yours
            for scheduler in self.schedulers:
                scheduler.step()

    def train(self, steps, before=None):
        for micro in steps:
            if before is not None:
                before(self)
            self.step(micro)
        self.guard.sync()
        return self

    def finish(self):
        self.guard.close()
        state = whole(self.model, self.optimizers, self.schedulers)
        if not self.own:
            state["random"] = torch.get_rng_state()
        return Run(self.guard, state)


def data_for(drive, count=STEPS):
    return step_batches(count, 2 if drive.endswith("accumulated") else 1)


def with_bad(steps, place, at=BAD):
    """Return the steps with a NaN gradient in one tower, from the last micro-batch of one step."""
    return [[*micro[:-1], unreachable(micro[-1], place)] if i == at else micro for i, micro in enumerate(steps)]


def without(steps, at=BAD):
    return [micro for i, micro in enumerate(steps) if i != at]


def once(action, at=BAD):
    """Act before a step, the first time it comes."""
    done = []

    def look(loop):
        if loop.guard.next_step == at and not done:
            done.append(True)
            action(loop)

    return look


def check_no_trace(pair, place, drive="train_step", **options):
    """Train with and without the bad step; the two end in one state."""
    steps = data_for(drive)
    saw = Loop(pair, drive, **options).train(with_bad(steps, place)).finish()
    never = Loop(pair, drive, **options).train(without(steps)).finish()
    assert [(i.step, i.kind, i.action) for i in saw.guard.incidents] == [(BAD, "nonfinite-gradient", "skipped")]
    assert {name.split(".")[0] for name, _ in saw.guard.incidents[0].culprits} == {place}
    assert [r.step for r in saw.guard.history] == list(range(STEPS))
    assert [r.step for r in saw.guard.history if r.action == "skipped"] == [BAD]
    assert never.guard.incidents == []
    assert saw.same_as(never) == []


# a NaN gradient in one of the two


@pytest.mark.parametrize(
    ("pair", "situation"), part_of(PAIRS, [" / ".join(s) for s in product(TOWERS, DRIVES, SCHEDULES)], every=97)
)
def test_a_bad_batch_in_one_leaves_no_trace_in_either(pair, situation):
    """Weights, buffers, the state of both optimizers at any depth, and all schedulers are as if it never came."""
    place, drive, schedule = situation.split(" / ")
    check_no_trace(pair, place, drive, schedule=schedule)


@pytest.mark.parametrize(("kind", "partner", "place"), part_of(NAMES, ("AdamW", "Lion"), TOWERS, every=14))
def test_a_diagnosis_leaves_no_trace_either(kind, partner, place, tmp_path):
    """The default policy reruns the bad step to explain it. Nothing of that stays in either optimizer."""
    steps = data_for("train_step")
    runs = [
        Loop(f"{kind}+{partner}", schedule="one schedule", policy={"diagnose": "new"}, run_dir=tmp_path / name)
        .train(seen)
        .finish()
        for name, seen in (("saw", with_bad(steps, place)), ("never", without(steps)))
    ]
    assert [(i.step, i.action) for i in runs[0].guard.incidents] == [(BAD, "skipped")]
    assert runs[0].same_as(runs[1]) == []


@pytest.mark.parametrize("pair", part_of(PAIRS, every=15))
def test_a_healthy_pair_is_the_plain_loop(pair):
    """Without clipping, and in the form each optimizer has: bit for bit the loop that calls both."""
    steps = step_batches(STEPS)
    guarded = Loop(pair, "own loop", policy={"switch_to_fused": False}, max_norm=None).train(steps).finish()
    torch.manual_seed(0)
    model = Towers(pair)
    optimizers = build(pair, model)
    for (batch,) in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_fn(model, batch).backward()
        for optimizer in optimizers:
            optimizer.step()
    assert guarded.guard.incidents == []
    assert list(differences("", guarded.state, whole(model, optimizers, []))) == []


@pytest.mark.parametrize(("pair", "drive"), part_of(PAIRS, ("own loop", "own loop accumulated"), every=27))
def test_a_step_is_one_record_over_both(pair, drive):
    """Its norm is the norm of all gradients, and every parameter of both towers is in it."""
    loop = Loop(pair, drive)
    parameters = dict(loop.model.named_parameters())
    norms = []
    step = loop.guard.step

    def watched(loss=None):
        norms.append({name: p.grad.norm().item() for name, p in parameters.items()})
        step(loss)

    loop.guard.step = watched
    loop.train(data_for(drive, 4)).finish()
    assert [r.step for r in loop.guard.history] == list(range(4))
    for record, expected in zip(loop.guard.history, norms, strict=True):
        assert record.by_parameter == pytest.approx(expected, rel=1e-5)
        assert record.grad_norm == pytest.approx(sum(x**2 for x in expected.values()) ** 0.5, rel=1e-5)


# state that somebody else overwrote


@pytest.mark.parametrize(
    ("pair", "situation"),
    part_of(
        PAIRS,
        [" / ".join(s) for s in product(HARMS, TOWERS, ("train_step", "late", "own loop accumulated"), SCHEDULES[::2])],
        every=97,
    ),
)
def test_poison_in_one_sends_both_back(pair, situation):
    """The run trains again from the copy with the same data, so it ends where an unpoisoned run with copies ends."""
    harm, place, drive, schedule = situation.split(" / ")
    steps = data_for(drive)

    def run(before=None):
        loop = Loop(pair, drive, schedule, policy={"snapshot_every": 2})
        return loop.train(loop.guard.wrap(steps), before).finish()

    poisoned, never = run(once(lambda loop: HARMS[harm](loop.model, loop.optimizers, place))), run()
    assert [(i.kind, i.action, i.restored_step, i.stepped_over) for i in poisoned.guard.incidents] == [
        ("nonfinite-weight", "rewound", 4, 0)
    ]
    assert [r.step for r in poisoned.guard.history] == list(range(STEPS))
    assert never.guard.incidents == []
    assert poisoned.same_as(never) == []


@pytest.mark.parametrize(
    ("kind", "partner", "situation"),
    part_of(NAMES, ("AdamW", "Lion"), [" / ".join(s) for s in product(HARMS, TOWERS, SCHEDULES[:2])], every=18),
)
def test_poison_in_one_sends_both_back_to_a_checkpoint(kind, partner, situation, tmp_path):
    """The same from the disk, with no copy in memory."""
    harm, place, schedule = situation.split(" / ")
    steps = data_for("train_step")

    def run(name, before=None):
        kept = nanproof.Checkpoints(tmp_path / name, every=2, prove=1, background=False)
        loop = Loop(f"{kind}+{partner}", schedule=schedule, checkpoints=kept)
        return loop.train(loop.guard.wrap(steps), before).finish()

    poisoned = run("poisoned", once(lambda loop: HARMS[harm](loop.model, loop.optimizers, place)))
    never = run("never")
    assert [(i.kind, i.action, i.restored_step) for i in poisoned.guard.incidents] == [("nonfinite-weight", "rolled-back", 4)]
    assert [r.step for r in poisoned.guard.history] == list(range(STEPS))
    assert poisoned.same_as(never) == []


@pytest.mark.parametrize(("pair", "place"), part_of(PAIRS, TOWERS, every=45))
def test_without_a_state_to_go_back_to_the_other_stays_whole(pair, place):
    """A poisoned weight halts the run at the cap at the latest; until then neither optimizer steps."""
    loop = Loop(pair, policy={"max_consecutive_skips": 2})
    steps = step_batches(STEPS)
    loop.train(steps[:BAD])
    poison_weight(loop.model, loop.optimizers, place)
    before = whole(loop.model, loop.optimizers, [])
    with pytest.raises(nanproof.TrainingHalted):
        for micro in steps[BAD : BAD + 3]:
            loop.step(micro)
    assert {i.kind for i in loop.guard.incidents} == {"nonfinite-weight"}
    poisoned = f"/model/{place}.0.weight"
    assert [name for name in differences("", whole(loop.model, loop.optimizers, []), before) if name != poisoned] == []


@pytest.mark.parametrize(("pair", "place"), part_of(PAIRS, TOWERS, every=45))
def test_after_going_back_the_rates_of_both_climb(pair, place):
    """Bit for bit the run whose loop scales every rate, at any depth, by 1/4, 2/4 and 3/4."""
    steps = step_batches(STEPS)
    policy = {"snapshot_every": 2, "rewarm_steps": 3}
    loop = Loop(pair, policy=policy)
    harm = once(lambda loop: poison_weight(loop.model, loop.optimizers, place))
    climbed = loop.train(loop.guard.wrap(steps), harm).finish()
    by_hand = Loop(pair, policy=policy)
    rates = [(group, group["lr"]) for group in rate_groups(by_hand.optimizers)]

    def scale(loop):
        factor = {4: 0.25, 5: 0.5, 6: 0.75}.get(loop.guard.next_step, 1.0)
        for group, rate in rates:
            group["lr"] = rate * factor

    expected = by_hand.train(steps, scale).finish()
    assert [(i.action, i.restored_step) for i in climbed.guard.incidents] == [("rewound", 4)]
    assert all(group["lr"] in (RATE, RATE / 4) for group in rate_groups(loop.optimizers))
    assert climbed.same_as(expected) == []


# checkpoints


@pytest.mark.parametrize(
    ("pair", "situation"),
    part_of(PAIRS, [" / ".join(s) for s in product(("train_step", "accumulated", "own loop"), SCHEDULES[1:])], every=79),
)
def test_new_objects_resume_where_the_old_ones_stopped(pair, situation, tmp_path):
    """Weights, inner moments and schedules come from the checkpoint; the end is that of the run that was not interrupted."""
    drive, schedule = situation.split(" / ")
    steps = data_for(drive)

    def made(name, seed=0):
        kept = nanproof.Checkpoints(tmp_path / name, every=2, prove=1, background=False)
        return Loop(pair, drive, schedule, seed=seed, checkpoints=kept)

    loop = made("whole")
    uninterrupted = loop.train(loop.guard.wrap(steps)).finish()
    loop = made("stopped")
    loop.train(islice(loop.guard.wrap(steps), 7)).finish()
    fresh = made("stopped", seed=9)
    data = None if fresh.own else fresh.guard.wrap(steps)
    assert fresh.guard.resume() == 6
    resumed = fresh.train(steps[6:] if data is None else data).finish()
    assert [r.step for r in resumed.guard.history][-4:] == [6, 7, 8, 9]
    assert resumed.same_as(uninterrupted) == []


@pytest.mark.parametrize("kind", part_of(NAMES, every=4))
def test_a_bad_batch_after_a_resume_leaves_no_trace(kind, tmp_path):
    """State that came from the disk is guarded like state that was made by stepping."""
    steps = data_for("train_step")

    def made(name, seed=0):
        kept = nanproof.Checkpoints(tmp_path / name, every=2, prove=1, background=False)
        return Loop(f"{kind}+AdamW", "train_step", "one schedule", seed=seed, checkpoints=kept)

    whole_run = made("whole").train(without(steps, 8)).finish()
    made("stopped").train(steps[:7]).finish()
    fresh = made("stopped", seed=9)
    assert fresh.guard.resume() == 6
    resumed = fresh.train(with_bad(steps, "first", 8)[6:]).finish()
    assert [(i.step, i.action) for i in resumed.guard.incidents] == [(8, "skipped")]
    assert resumed.same_as(whole_run) == []


# each optimizer with its own norm


def first_only(a, b):
    return {a: 1.0, b: None}


def own_norms(a, b):
    return {a: 0.5, b: 2.0}


@pytest.mark.parametrize(("pair", "norms"), part_of(PAIRS, ("first_only", "own_norms"), every=27))
def test_each_optimizer_is_clipped_by_its_own_norm(pair, norms):
    """The weights after one step are those of clip_grad_norm_ for each optimizer and then both steps."""
    limits = {"first_only": first_only, "own_norms": own_norms}[norms]

    def big(model, batch):
        return 50 * loss_fn(model, batch)

    ((batch,),) = step_batches(1)
    loop = Loop(pair, "own loop", policy={"switch_to_fused": False}, max_norm=limits)
    loss = big(loop.model, batch)
    loss.backward()
    loop.guard.step(loss)
    torch.manual_seed(0)
    model = Towers(pair)
    optimizers = build(pair, model)
    big(model, batch).backward()
    total = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    for place, limit in zip(TOWERS, limits(*TOWERS).values(), strict=True):
        parameters = list(getattr(model, place).parameters())
        norm = torch.cat([p.grad.flatten() for p in parameters]).norm().item()
        assert norm > 4  # otherwise nothing is clipped, and nothing tested
        if limit is not None:
            torch.nn.utils.clip_grad_norm_(parameters, limit)
    for optimizer in optimizers:
        optimizer.step()
    least = 2e-4 if "Muon" in pair else 1e-7  # Muon rounds to bf16 inside: the last digit of a gradient can show
    for (name, mine), expected in zip(loop.model.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-6, atol=least, msg=lambda text, name=name: f"{name}: {text}")
    assert loop.guard.history[-1].grad_norm == pytest.approx(total, rel=1e-5)


def test_the_clipped_gradient_is_that_of_clip_grad_norm_for_each():
    """Plain SGD of rate 1 shows the gradient itself: the difference is at most 1e-6 of it."""
    torch.manual_seed(0)
    model = Towers("SGD+SGD")
    before = [p.detach().clone() for p in model.parameters()]
    a, b = (torch.optim.SGD(getattr(model, place).parameters(), lr=1.0) for place in TOWERS)
    ((batch,),) = step_batches(1)
    with nanproof.Guard(model, [a, b], max_norm={a: 1.0, b: None}) as guard:
        loss = 50 * loss_fn(model, batch)
        loss.backward()
        gradients = [p.grad.clone() for p in model.parameters()]
        guard.step(loss)
    half = len(gradients) // 2
    norm = torch.cat([g.flatten() for g in gradients[:half]]).norm()
    assert norm > 4
    expected = [g / (norm + 1e-6) for g in gradients[:half]] + gradients[half:]
    moved = [old - p.detach() for old, p in zip(before, model.parameters(), strict=True)]
    for mine, want in zip(moved, expected, strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("pair", "situation"), part_of(PAIRS, [" / ".join(s) for s in product(TOWERS, ("train_step", "own loop"))], every=97)
)
def test_with_norms_of_their_own_they_are_still_refused_together(pair, situation):
    """Also where the fault is in the optimizer that is not clipped."""
    place, drive = situation.split(" / ")
    check_no_trace(pair, place, drive, schedule="one schedule", max_norm=first_only)


# who owns a parameter


def test_a_parameter_in_two_optimizers_is_refused():
    model = Towers("AdamW+AdamW")
    first = list(model.first.parameters())
    a, b = torch.optim.AdamW(first, lr=RATE), torch.optim.SGD([first[0], *model.second.parameters()], lr=RATE)
    with pytest.raises(nanproof.UsageError, match="parameter"):
        nanproof.Guard(model, [a, b])


@pytest.mark.parametrize("kind", NAMES)
def test_a_parameter_inside_a_container_and_in_another_is_refused(kind):
    """Whatever the first one is, a parameter of it that the second one also has is two updates a step."""
    model = Towers(f"{kind}+AdamW")
    a, _ = build(f"{kind}+AdamW", model)
    shared = list(model.first.parameters())[-1:]
    b = torch.optim.SGD([*shared, *model.second.parameters()], lr=RATE)
    with pytest.raises(nanproof.UsageError, match="parameter"):
        nanproof.Guard(model, [a, b])


def test_an_optimizer_given_next_to_its_own_container_is_refused():
    model = Towers("AdamW+AdamW")
    inner = torch.optim.AdamW(model.first.parameters(), lr=RATE)
    for outer in (Container([inner]), Lookahead(inner)):
        with pytest.raises(nanproof.UsageError, match="parameter"):
            nanproof.Guard(model, [outer, inner])


@pytest.mark.parametrize("order", [1, -1])
def test_a_zero_grad_without_arguments_is_enough_in_a_pair_too(order):
    """An optimizer that is not torch's is called as it would be on its own."""

    class Bare:
        def __init__(self, params):
            self.param_groups, self.state = [{"params": list(params), "lr": RATE}], {}

        def zero_grad(self):
            for p in self.param_groups[0]["params"]:
                p.grad = None

        @torch.no_grad()
        def step(self):
            for p in self.param_groups[0]["params"]:
                p -= RATE * p.grad

    def run(steps):
        torch.manual_seed(0)
        model = Towers("AdamW+AdamW")
        optimizers = [Bare(model.first.parameters()), torch.optim.AdamW(model.second.parameters(), lr=RATE)][::order]
        with nanproof.Guard(model, optimizers, loss_fn=loss_fn, policy=nanproof.Policy(diagnose="never")) as guard:
            for micro in steps:
                guard.train_step(*micro)
        return Run(guard, whole(model, optimizers, []))

    steps = step_batches(STEPS)
    saw, never = run(with_bad(steps, "first")), run(without(steps))
    assert [(i.step, i.action) for i in saw.guard.incidents] == [(BAD, "skipped")]
    assert saw.same_as(never) == []


# one optimizer for each parameter


@pytest.mark.parametrize(
    ("mixed", "drive"), [(mixed, drive) for mixed in ("AdamW", "mixed") for drive in ("train_step", "late", "own loop")]
)
def test_thirty_optimizers_are_one_step(mixed, drive):
    """One per parameter, the way Pyro makes them: one incident, and no trace in any of the thirty."""
    kinds = (torch.optim.AdamW, torch.optim.SGD, Lion) if mixed == "mixed" else (torch.optim.AdamW,)

    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.values = nn.ParameterList([nn.Parameter(torch.randn(3)) for _ in range(30)])

    def thirty_losses(model, batch):
        x, reach = batch
        return sum((p * x).square().sum() + (p * r).square().sum().sqrt() for p, r in zip(model.values, reach, strict=True))

    def run(data):
        torch.manual_seed(0)
        model = Many()
        optimizers = [kinds[i % len(kinds)]([p], lr=RATE) for i, p in enumerate(model.values)]
        policy = nanproof.Policy(lag=2 if drive == "late" else 0, diagnose="never")
        with nanproof.Guard(model, optimizers, loss_fn=thirty_losses, policy=policy) as guard:
            for batch in data:
                if drive != "own loop":
                    guard.train_step(batch)
                    continue
                for optimizer in optimizers:
                    optimizer.zero_grad()
                loss = thirty_losses(model, batch)
                loss.backward()
                guard.step(loss)
        return Run(guard, whole(model, optimizers, []))

    g = torch.Generator().manual_seed(1)
    data = [[torch.randn(3, generator=g), torch.ones(30)] for _ in range(STEPS)]
    seen = list(data)
    reach = torch.ones(30)
    reach[17] = 0.0
    seen[BAD] = [data[BAD][0], reach]
    saw, never = run(seen), run(without(data))
    assert [(i.step, i.kind, i.action) for i in saw.guard.incidents] == [(BAD, "nonfinite-gradient", "skipped")]
    assert [name for name, _ in saw.guard.incidents[0].culprits] == ["values.17"]
    assert len(saw.guard.history) == STEPS and len(saw.guard.history[-1].by_parameter) == 30
    assert saw.same_as(never) == []


# two guards in one loop


@pytest.mark.parametrize(("kind", "faulty"), part_of(("AdamW", "SGD", "RMSprop", "Lion"), ("generator", "critic"), every=2))
def test_two_guards_of_a_gan_keep_their_own_verdicts(kind, faulty):
    """A bad step of one is refused by its guard; the other steps, as in the loop that leaves out that half."""
    made = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD, "RMSprop": torch.optim.RMSprop, "Lion": Lion}[kind]

    def run(saw):
        torch.manual_seed(0)
        generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        first, second = made(generator.parameters(), lr=RATE), made(critic.parameters(), lr=RATE)
        policy = nanproof.Policy(lag=0, diagnose="never")
        guards = nanproof.Guard(generator, first, policy=policy), nanproof.Guard(critic, second, policy=policy)
        g = torch.Generator().manual_seed(1)
        for i in range(STEPS):
            real, noise = torch.randn(8, 6, generator=g), torch.randn(8, 4, generator=g)
            bad = float("nan") if i == BAD else 1.0
            if saw or (i, faulty) != (BAD, "critic"):
                second.zero_grad()
                loss = critic(generator(noise).detach()).mean() - critic(real).mean()
                if faulty == "critic":
                    loss = loss * bad
                loss.backward()
                guards[1].step(loss)
            if saw or (i, faulty) != (BAD, "generator"):
                first.zero_grad()
                loss = -critic(generator(noise)).mean()
                if faulty == "generator":
                    loss = loss * bad
                loss.backward()
                guards[0].step(loss)
        for guard in guards:
            guard.close()
        return guards, [whole(generator, [first], []), whole(critic, [second], [])]

    (guards, saw), (_, never) = run(True), run(False)
    bad, good = guards if faulty == "generator" else guards[::-1]
    assert [(i.step, i.action) for i in bad.incidents] == [(BAD, "skipped")]
    assert good.incidents == []
    assert [r.step for guard in guards for r in guard.history] == 2 * list(range(STEPS))
    assert list(differences("", saw, never)) == []


def test_every_kind_has_a_moment_to_poison():
    """The tests above would pass for nothing if the walk through an optimizer missed the ones inside it."""
    for kind in NAMES:
        torch.manual_seed(0)
        model = Towers(f"{kind}+AdamW")
        optimizers = build(f"{kind}+AdamW", model)
        loss_fn(model, step_batches(1)[0][0]).backward()
        for optimizer in optimizers:
            optimizer.step()
        state = whole(model, optimizers, [])
        assert {name for o in state["optimizers"][0] for name in o["state"]} == {
            n for n, _ in model.named_parameters() if "first" in n
        }
        HARMS["moment"](model, optimizers, "first")
        changed = list(differences("", whole(model, optimizers, []), state))
        assert changed and all(name.startswith("/optimizers/0/") for name in changed)
        assert len(list(inside(optimizers[0]))) == {"Container": 3, "MuonAdamW": 3, "Duck": 3, "Lookahead": 2}.get(kind, 1)
