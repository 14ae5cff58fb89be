"""A wrapped loader gives what the bare one gives, and goes on from any place, in this loop or in another process."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders import (
    EXACT,
    SIZE,
    Numbers,
    bad,
    bare,
    build,
    carried,
    oracle,
    order_of,
    quiet,
    rows,
    saved,
    seed_all,
    tell_epoch,
    train,
)
from torch.utils.data import (
    DataLoader,
)

from nanproof.recover.data._loaders import wrap
from nanproof.recover.data._quarantine import Quarantine


@pytest.mark.parametrize("kind", EXACT)
def test_an_undisturbed_run_is_the_bare_loaders(kind):
    """Same batches, same random numbers left for the training, and each ticket names the rows."""
    expected = oracle(kind, 3)
    seed_all(7)
    loader = build(kind)
    found = []
    for step in train(loader, 3):
        (ticket,) = loader.taken()
        assert ticket.epoch == step[0]
        if ticket.samples is not None and kind != "no batches":
            assert [s.index for s in ticket.samples] == rows([step[1]])
        found.append(step)
    assert found == expected
    assert loader.epoch == 3 and loader.taken() == []


@pytest.mark.parametrize("kind", EXACT)
def test_a_new_process_goes_on_at_every_place(kind):
    """From the state after each step of two epochs, with generators that stand anywhere, to the end of the third."""
    expected = oracle(kind, 3)
    seed_all(7)
    loader = build(kind)
    states = [(loader.epoch, carried(loader.state_dict()), saved())]
    states += [(step[0], carried(loader.state_dict()), saved()) for step in train(loader, 2)]
    for done, (epoch, state, random_state) in enumerate(states):
        seed_all(1000 + done)
        fresh = build(kind)
        for generator in (getattr(fresh, "generator", None), getattr(getattr(fresh, "sampler", None), "generator", None)):
            if isinstance(generator, torch.Generator):
                generator.manual_seed(done)
        fresh.load_state_dict(state)
        assert fresh.epoch == epoch
        random_state.restore()
        assert list(train(fresh, 3, first=fresh.epoch)) == expected[done:], done


@pytest.mark.parametrize("kind", ["random", "random, own generator", "drawing, Python", "eager"])
def test_a_resume_between_epochs(kind):
    """Saved after an epoch's end, it begins the next one as the run would have."""
    expected = oracle(kind, 2)
    seed_all(7)
    loader = build(kind)
    first = list(train(loader, 1))
    state, random_state = carried(loader.state_dict()), saved()
    seed_all(99)
    fresh = build(kind)
    if kind == "eager":  # a sampler that counts by itself starts anew with the process
        fresh.sampler.epoch = 1
    fresh.load_state_dict(state)
    random_state.restore()
    assert fresh.epoch == 1
    assert first + list(train(fresh, 2, first=1)) == expected


@pytest.mark.parametrize("kind", EXACT)
def test_a_running_loop_is_rewound(kind):
    """Several times, from and to random places, also into an earlier epoch: what comes is what came."""
    expected = oracle(kind, 3)
    seed_all(7)
    loader = build(kind)
    chance = random.Random(5)
    rewinds = 6
    kept = [(loader.state_dict(), saved())]
    found = []
    for _, batch, drew in train(loader, 3):
        found.append((batch, drew))
        kept.append((loader.state_dict(), saved()))
        assert found[-1] == expected[len(found) - 1][1:]
        if rewinds and chance.random() < 0.3:
            rewinds -= 1
            back = chance.randrange(max(1, len(found) - 8), len(found) + 1)
            del found[back:], kept[back + 1 :]
            state, random_state = kept[back]
            random_state.restore()
            loader.rewind(state)
            assert loader.taken() == []
    assert not rewinds
    assert found == [step[1:] for step in expected]


def test_the_order_of_rewind_and_restore_does_not_matter():
    """The generators may be put back before or after the call."""
    expected = oracle("random", 2)
    for restore_first in (True, False):
        seed_all(7)
        loader, found = build("random"), []
        for step in train(loader, 2):
            found.append(step[1:])
            if len(found) == 2:
                state, random_state = loader.state_dict(), saved()
            if len(found) == 4 and state is not None:
                if restore_first:
                    random_state.restore()
                loader.rewind(state)
                torch.rand(5)
                random_state.restore()
                del found[2:]
                state = None
        assert found == [step[1:] for step in expected]


def test_batches_are_stepped_over():
    """In this run, in the run that resumes it, and in no other epoch."""
    seed_all(7)
    loader = build("random")
    found, states = [], {}
    before = carried(loader.state_dict()), saved()
    for _ in train(loader, 3):
        (ticket,) = loader.taken()
        found.append((ticket.epoch, ticket.batch))
        states[found[-1]] = carried(loader.state_dict()), saved()
        if found[-1] == (1, 2) and found.count((1, 2)) == 1:
            states[(0, 1)][1].restore()
            loader.rewind(states[(0, 1)][0], step_over=[(0, 3), (1, 0), (1, 2)])
            assert loader.state_dict()["stepped_over"] == [[0, 3], [1, 0], [1, 2]]
    assert found == [(0, b) for b in range(5)] + [(1, b) for b in range(3)] + [
        *[(0, 2), (0, 4)],
        *[(1, 1), (1, 3), (1, 4)],
        *[(2, b) for b in range(5)],
    ]
    state = loader.state_dict()
    assert state["stepped_over"] == [[0, 3], [1, 0], [1, 2]]
    again = build("random")
    again.load_state_dict({**before[0], "stepped_over": state["stepped_over"]})
    before[1].restore()
    got = [(t.epoch, t.batch) for _ in train(again, 2) for t in again.taken()]
    assert got == [(0, 0), (0, 1), (0, 2), (0, 4), (1, 1), (1, 3), (1, 4)]


def test_a_rewind_into_an_earlier_epoch_keeps_the_order_of_the_later_one():
    """Even if other things drew random numbers between the epochs: what was stepped over stays what it was."""
    seed_all(7)
    loader = build("random")
    order, seen = {}, []
    state = None
    for _ in range(2):
        for batch in loader:
            (ticket,) = loader.taken()
            order.setdefault((ticket.epoch, ticket.batch), batch.tolist())
            assert rows([order[(ticket.epoch, ticket.batch)]]) == rows([batch.tolist()])
            seen.append((ticket.epoch, ticket.batch))
            if seen[-1] == (0, 3):
                state = state or loader.state_dict()
            if seen[-1] == (1, 1) and seen.count((1, 1)) == 1:
                seed_all(123)
                loader.rewind(state, step_over=[(1, 1)])
        torch.rand(17)
    assert seen == [(0, b) for b in range(5)] + [(1, 0), (1, 1), (0, 4), (1, 0), (1, 2), (1, 3), (1, 4)]


def test_a_rewind_after_the_loop_reaches_the_next_one():
    """A step may be found bad when its epoch is over: the next loop gives the rest of that epoch, then its own."""
    loader = build("sequential")
    states = [loader.state_dict() for _ in loader]
    loader.taken()
    loader.rewind(states[3])
    places = [(t.epoch, t.batch) for _ in loader for t in loader.taken()]
    assert places == [(0, 4), (0, 5)] + [(1, b) for b in range(6)]
    assert loader.epoch == 2


def test_a_rewind_after_the_loop_with_a_sampler_that_is_told_its_epoch():
    """The rest of the old epoch comes in its order, and the new one in the order that was asked for."""
    plain = bare("distributed")
    orders = {}
    for epoch in range(3):
        tell_epoch(plain, epoch)
        orders[epoch] = [rows([b.tolist()]) for b in plain]
    loader = build("distributed")
    tell_epoch(loader, 0)
    states = [loader.state_dict() for _ in loader]
    loader.rewind(states[1])
    tell_epoch(loader, 1)
    assert [rows([b.tolist()]) for b in loader] == orders[0][2:] + orders[1]
    tell_epoch(loader, 2)
    assert [rows([b.tolist()]) for b in loader] == orders[2]


def test_a_batch_sampler_that_gives_tensors():
    """Indices may be anything that stands for a whole number."""
    quarantine = Quarantine(None)
    quarantine.add([bad(3), bad(7)])
    for kind in (torch.tensor, np.array, tuple):
        batches = [kind([1, 2, 3]), kind([7]), kind([4, 5])]
        data = wrap(DataLoader(Numbers(random_numbers=False), batch_sampler=batches), quarantine)
        assert [rows([b.tolist()]) for b in data] == [[1, 2], [4, 5]]
        assert [[s.index for s in t.samples] for t in data.taken()] == [[1, 2], [4, 5]]


def test_a_quarantined_sample_is_left_out():
    """From the next pass on, and of nothing but its own batch; an empty batch is not handed out and keeps its place."""
    quarantine, own = Quarantine(None), bare("sequential")
    loader = wrap(own, quarantine)
    it = iter(loader)
    next(it)
    state = loader.state_dict()
    next(it)
    quarantine.add([bad(5), bad(8), bad(9), bad(10), bad(11), bad(2)])
    loader.rewind(state)
    loader.taken()
    assert [rows([b.tolist()]) for b in it] == [[4, 6, 7], [12, 13, 14, 15], [16, 17, 18, 19], [20, 21, 22]]
    assert [t.batch for t in loader.taken()] == [1, 3, 4, 5]
    assert rows(b.tolist() for b in loader)[:3] == [0, 1, 3]
    assert rows(b.tolist() for b in own) == list(range(SIZE))  # the user's own loader is what it was


def test_quarantine_without_batches():
    quarantine = Quarantine(None)
    quarantine.add([bad(3, size=9)])
    loader = build("no batches", quarantine)
    assert sorted(rows([b.tolist()] for b in loader)) == [0, 1, 2, 4, 5, 6, 7, 8]
    quarantine.add([bad(3)])
    lists = build("batches as samples", quarantine)
    assert sorted(rows(b.tolist() for b in lists)) == [n for n in range(SIZE) if n != 3]


@pytest.mark.parametrize("kind", ["sequential", "random", "random, own generator", "eager", "drawing, Python", "stream", "list"])
@settings(max_examples=25)
@given(
    actions=st.lists(
        st.tuples(st.sampled_from("take take take take rewind resume quarantine step".split()), st.integers(0, 200)), max_size=40
    )
)
def test_any_sequence_of_takes_rewinds_and_resumes(kind, actions):
    """Against a list of all the batches of five epochs and a number that says how many were taken."""
    seed_all(3)
    epochs = [[b.tolist() for b in e] for e in order_of(kind, 5)]  # the dataset draws no numbers: only the sampler does
    batches = [(e, b, rows([batch])) for e, epoch in enumerate(epochs) for b, batch in enumerate(epoch)]
    quarantine = Quarantine(None)
    seed_all(3)
    loader = quiet(build(kind, quarantine))
    states, at, out, stepped = {0: (loader.state_dict(), saved())}, 0, set(), set()

    def following(loader):
        while True:
            yield from loader

    it = following(loader)
    for action, number in actions:
        if action == "take":
            wanted = [(e, b, [r for r in x if r not in out]) for e, b, x in batches[at:] if (e, b) not in stepped]
            wanted = [w for w in wanted if w[2]]
            if not wanted or wanted[0][0] > 3:
                break
            batch = next(it)
            (ticket,) = loader.taken()
            assert (ticket.epoch, ticket.batch, rows([batch.tolist()])) == wanted[0]
            at = [b[:2] for b in batches].index(wanted[0][:2]) + 1
            states[at] = loader.state_dict(), saved()
        elif action in ("rewind", "step", "quarantine"):
            back = sorted(states)[number % len(states)]
            if action == "quarantine" and kind not in ("stream", "list"):
                quarantine.add([bad(number % SIZE)])
                out.add(number % SIZE)
            if action == "step" and at:
                stepped.add(batches[number % at][:2])
            states[back][1].restore()
            loader.rewind(states[back][0], step_over=[batches[number % at][:2]] if action == "step" and at else ())
            at = back
        else:
            state, random_state = carried(loader.state_dict()), saved()
            seed_all(number)
            loader = quiet(build(kind, quarantine))
            loader.load_state_dict(state)
            random_state.restore()
            it = following(loader)
