"""Workers, streams, iterators, datasets, broken loops: a wrapped one leaves out what it was told to, and keeps its place."""

import functools
import logging
import multiprocessing

import pytest
import torch
from loaders import (
    SIZE,
    Numbers,
    Stream,
    bad,
    bare,
    build,
    carried,
    quiet,
    rows,
    saved,
    seed_all,
    seeded,
)
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from nanproof import UsageError
from nanproof.recover.data._loaders import Sample, Ticket, WrappedDataset, WrappedLoader, wrap
from nanproof.recover.data._quarantine import Quarantine, sample_hash


def test_a_broken_loop_starts_the_next_epoch():
    """As a bare loader does; its state still says where it broke off."""
    loader = build("sequential")
    for _ in loader:
        break
    assert loader.epoch == 1 and (loader.state_dict()["epoch"], loader.state_dict()["batch"]) == (0, 1)
    for _ in loader:
        break
    assert [(t.epoch, t.batch) for t in loader.taken()] == [(0, 0), (1, 0)]


def test_a_batch_that_cannot_be_loaded():
    """Whoever goes on after the exception gets the next batch, with the right ticket."""

    class Failing(Numbers):
        def __getitem__(self, index):
            if index == 5:
                raise KeyError("no such sample")
            return super().__getitem__(index)

    loader = wrap(DataLoader(Failing(), batch_size=4), Quarantine(None))
    it = iter(loader)
    next(it)
    with pytest.raises(KeyError):
        next(it)
    assert rows([next(it).tolist()]) == [8, 9, 10, 11]
    assert [t.batch for t in loader.taken()] == [0, 2]


class Flaky(Numbers):
    """Its first sample cannot be read at first; others are noisy, with the loader's own generator."""

    failing = True
    generator = None

    def __getitem__(self, index):
        if self.failing:
            raise OSError("the disk is away")
        return torch.tensor([float(index), torch.rand((), generator=self.generator).item()])


def test_a_state_from_before_the_first_batch():
    """The order was drawn, but no batch came: it is not drawn anew."""
    loader = wrap(DataLoader(Flaky(), batch_size=4, shuffle=True), Quarantine(None))
    it = iter(loader)
    with pytest.raises(OSError):
        next(it)
    state = carried(loader.state_dict())
    loader.dataset.failing = False
    rest = rows(b.tolist() for b in it)
    seed_all(77)
    fresh = wrap(DataLoader(Flaky(), batch_size=4, shuffle=True), Quarantine(None))
    fresh.dataset.failing = False
    fresh.load_state_dict(state)
    assert rows(b.tolist() for b in fresh)[4:] == rest


def test_augmentation_from_the_loaders_generator():
    """The sampler's numbers and the samples' come from one generator: it is put back to where it stood."""

    def make(seed):
        loader = DataLoader(Flaky(), batch_size=4, shuffle=True, generator=seeded(seed))
        loader.dataset.failing, loader.dataset.generator = False, loader.generator
        return wrap(loader, Quarantine(None))

    loader = make(1)
    it = iter(loader)
    next(it), next(it)
    state = carried(loader.state_dict())
    rest = [b.tolist() for b in it]
    fresh = make(2)
    fresh.load_state_dict(state)
    assert [b.tolist() for b in fresh] == rest


def test_skipping_loads_no_data():
    loader = build("random")
    it = iter(loader)
    for _ in range(4):
        next(it)
    state = loader.state_dict()
    fresh = build("random")
    fresh.load_state_dict(state)
    assert len(list(fresh)) == 1
    assert fresh.dataset.fetched == SIZE - 20


def test_it_looks_like_the_loader():
    own = bare("random")
    loader = wrap(own, Quarantine(None))
    assert len(loader) == 5 and loader.batch_size == 5 and isinstance(loader.sampler, RandomSampler)
    assert loader.dataset is own.dataset
    with pytest.raises(AttributeError):
        _ = loader.nonsense
    assert wrap(loader, Quarantine(None)) is loader


def test_samples_of_a_map_style_batch_are_hashed_on_demand():
    """The hash is of the sample as the dataset gives it, and asking costs no random numbers."""
    loader = wrap(DataLoader(Numbers(random_numbers=False), batch_size=4, shuffle=True), Quarantine(None))
    next(iter(loader))
    (ticket,) = loader.taken()
    before = saved()
    found = loader.samples_of(ticket, [1, 3])
    assert not saved().moved_since(before)
    assert [s.index for s in found] == [ticket.samples[1].index, ticket.samples[3].index]
    assert [s.hash for s in found] == [sample_hash(torch.tensor([float(s.index)])) for s in found]
    assert loader.samples_of(Ticket(0, 0, None), [0]) == []


def test_a_stream_leaves_out_by_hash_and_by_place():
    quarantine = Quarantine(None)
    loader = build("stream", quarantine)
    batch = next(iter(loader))
    (ticket,) = loader.taken()
    assert ticket.samples == tuple(Sample(i, sample_hash(batch[i])) for i in range(4))
    (sample,) = loader.samples_of(ticket, [2])
    quarantine.add([bad(77, size=None, hash=sample.hash), bad(6, size=None)])
    assert [rows([b.tolist()]) for b in loader][:2] == [[0, 1, 3, 4], [5, 7, 8, 9]]


def test_a_stream_that_shifts_loses_nothing():
    """What is quarantined behind the place it is rewound to moves no sample over it."""
    quarantine = Quarantine(None)
    loader = build("stream", quarantine)
    it = iter(loader)
    found = [rows([next(it).tolist()]) for _ in range(2)]
    state = loader.state_dict()
    quarantine.add([bad(1, size=None), bad(9, size=None)])
    loader.rewind(state)
    found += [rows([b.tolist()]) for b in it]
    assert found[:3] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 10, 11, 12]]
    assert [row for batch in found for row in batch] == [n for n in range(SIZE) if n != 9]


@pytest.mark.parametrize("kind", ["random", "random, its sampler's generator", "drawing, Python"])
def test_a_resume_with_another_number_of_workers(kind):
    """Workers read ahead; the order does not depend on it."""
    seed_all(7)
    expected = [rows([b.tolist()]) for b in quiet(build(kind))]
    for before, after in [(2, 0), (0, 2)]:
        seed_all(7)
        loader = build(kind, num_workers=before)
        it = iter(loader)
        found = [rows([next(it).tolist()]) for _ in range(2)]
        state = carried(loader.state_dict())
        seed_all(8)
        fresh = quiet(build(kind, num_workers=after))
        fresh.load_state_dict(state)
        assert found + [rows([b.tolist()]) for b in fresh] == expected


def test_a_stream_with_another_number_of_workers(caplog):
    """Its samples are shared out differently: the batches are counted, and a warning says that this is not exact."""
    loader = build("stream")
    it = iter(loader)
    next(it), next(it)
    state = loader.state_dict()
    fresh = build("stream", num_workers=1)
    fresh.load_state_dict(state)
    with caplog.at_level(logging.WARNING, "nanproof"):
        rest = [rows([b.tolist()]) for b in fresh]
    assert "num_workers=0" in caplog.text and rest[0] == [8, 9, 10, 11] and rest[-1] == [20, 21, 22]


def test_a_wrapped_stream_in_a_wrapped_loader_is_filtered_once():
    quarantine = Quarantine(None)
    quarantine.add([bad(2, size=None), bad(5, size=None)])
    loader = wrap(DataLoader(wrap(Stream(8), quarantine), batch_size=3), quarantine)
    assert rows(b.tolist() for b in loader) == [0, 1, 3, 4, 6, 7]


def test_tickets_that_nobody_asks_for_do_not_pile_up():
    loader = wrap(list(range(3000)), Quarantine(None))
    assert len(list(loader)) == 3000
    assert [t.batch for t in loader.taken()] == list(range(3000 - 1024, 3000))


def workers_left():
    """Not collected first: an iterator in a cycle of references could be collected in a forked worker, where torch hangs."""
    return multiprocessing.active_children()


@pytest.mark.parametrize(
    ("kind", "persistent"),
    [
        ("random", False),
        ("random", True),
        ("random, own generator", True),
        ("eager batches", True),
        pytest.param("random, own generator", False, marks=pytest.mark.slow),  # starts nine workers
        pytest.param("eager batches", False, marks=pytest.mark.slow),
    ],
)
def test_workers_give_the_same_order(kind, persistent):
    """Undisturbed, rewound across epochs, and in a new process; and none is left over."""
    more = {"num_workers": 2, "persistent_workers": persistent}
    seed_all(7)
    plain = bare(kind, **more)
    expected = [rows([b.tolist()]) for _ in range(3) for b in plain]
    seed_all(7)
    loader = build(kind, **more)
    found, states, rewound = [], [], False
    for _ in range(3):
        for batch in loader:
            found.append(rows([batch.tolist()]))
            states.append((loader.state_dict(), saved()))
            if len(found) == 8 and not rewound:
                rewound = True
                states[2][1].restore()
                loader.rewind(states[2][0])
                del found[3:], states[3:]
    assert found == expected
    seed_all(1)
    fresh = build(kind, **more)
    place = next(i for i, (state, _) in enumerate(states) if (state["epoch"], state["batch"]) == (1, 2))
    fresh.load_state_dict(carried(states[place][0]))
    states[place][1].restore()
    assert [rows([b.tolist()]) for _ in range(fresh.epoch, 3) for b in fresh] == expected[place + 1 :]
    del plain, loader, fresh
    assert not workers_left()


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_read_a_stream_in_turns(persistent):
    """Rewound and resumed at an odd place, in the order that each worker drew; samples carry their worker."""
    make = functools.partial(DataLoader, batch_size=3, num_workers=2, persistent_workers=persistent)
    seed_all(7)
    expected = [rows([b.tolist()]) for b in make(Stream(29, shuffled=True))]
    seed_all(7)
    quarantine = Quarantine(None)
    loader = wrap(make(Stream(29, shuffled=True)), quarantine)
    found, states, tickets = [], [], []
    for batch in loader:
        found.append(rows([batch.tolist()]))
        states.append(loader.state_dict())
        tickets += loader.taken()
        if len(found) == 7 and len(tickets) in (7, 11):  # twice to the same place
            loader.rewind(states[2])
            del found[3:], states[3:]
    assert found == expected
    assert [t.samples[0].worker for t in tickets[:4]] == [0, 1, 0, 1]
    assert all(s.hash == sample_hash(torch.tensor([float(r)])) for s, r in zip(tickets[0].samples, expected[0], strict=True))
    fresh = wrap(make(Stream(29, shuffled=True)), quarantine)
    fresh.load_state_dict(carried(states[4]))
    seed_all(2)
    assert [rows([b.tolist()]) for b in fresh] == expected[5:]
    quarantine.add([bad(1, size=None, worker=1, workers=2)])
    ordered = wrap(make(Stream(29)), quarantine)
    assert sorted(rows(b.tolist() for b in ordered)) == [n for n in range(29) if n != 3]
    del loader, fresh, ordered, batch
    assert not workers_left()


def test_workers_start_with_the_same_seeds():
    """At the beginning of an epoch, even their random augmentation is repeated."""
    loader = build("random", num_workers=2)
    it = iter(loader)
    state, random_state = carried(loader.state_dict()), saved()
    expected = [b.tolist() for b in it]
    seed_all(5)
    fresh = build("random", num_workers=2)
    fresh.load_state_dict(state)
    random_state.restore()
    assert [[row[:2] for row in b.tolist()] for b in fresh] == [[row[:2] for row in b] for b in expected]  # torch's numbers


def test_a_broken_loop_ends_its_workers():
    loader = build("sequential", num_workers=2)
    for _ in loader:
        break
    assert not workers_left()
    for _ in loader:
        state = loader.state_dict()
        loader.rewind(state)
        assert not workers_left()
        break


def test_an_iterator_that_is_read_once(caplog):
    """It is resumed by consuming, and a rewind is one warning."""
    loader = wrap(iter(range(10)), Quarantine(None))
    it = iter(loader)
    assert [next(it) for _ in range(4)] == [0, 1, 2, 3]
    state = carried(loader.state_dict())
    assert next(it) == 4
    with caplog.at_level(logging.WARNING, "nanproof"):
        loader.rewind(state)
        assert next(it) == 5
        loader.rewind(state)
        assert next(it) == 6
    assert len(caplog.records) == 1 and "read once" in caplog.text
    fresh = wrap((n for n in range(10)), Quarantine(None))
    fresh.load_state_dict(state)
    assert list(fresh) == [4, 5, 6, 7, 8, 9]
    assert [t.batch for t in fresh.taken()] == [4, 5, 6, 7, 8, 9]


def test_what_cannot_be_wrapped():
    gone = (n for n in range(2))
    list(gone)
    for data, text in [(gone, "exhausted"), (3, "int"), ("abc", "str"), ({}, "dict"), (Numbers, "class Numbers")]:
        with pytest.raises(UsageError, match=text):
            wrap(data, Quarantine(None))


def test_a_state_of_something_else_is_refused(caplog):
    loader = build("sequential")
    for state in ({}, 3, build("list").state_dict(), {**loader.state_dict(), "version": 99}):
        with pytest.raises(UsageError):
            loader.load_state_dict(state)
    shorter = wrap(DataLoader(Numbers(), batch_size=8), Quarantine(None))
    with caplog.at_level(logging.WARNING, "nanproof"):
        shorter.load_state_dict(loader.state_dict())
    assert "6 batches" in caplog.text and "3 now" in caplog.text


def test_a_wrapped_dataset_gives_another_sample():
    """Length and indices stay; the next healthy sample comes instead, also across the end and in a batch of indices."""

    class Several(Numbers):
        def __getitems__(self, indices):
            return [self[i] for i in indices]

    quarantine = Quarantine(None)
    data, several = wrap(Numbers(random_numbers=False), quarantine), wrap(Several(random_numbers=False), quarantine)
    assert isinstance(data, WrappedDataset) and not hasattr(data, "__getitems__") and wrap(data, quarantine) is data
    assert len(data) == SIZE and data.size == SIZE and data.taken() == []
    assert rows([[data[i].tolist() for i in range(SIZE)]]) == list(range(SIZE))
    quarantine.add([bad(4), bad(5), bad(SIZE - 1)])
    wanted = [{4: 6, 5: 6, SIZE - 1: 0}.get(i, i) for i in range(SIZE)]
    assert rows([[data[i].tolist() for i in range(SIZE)]]) == wanted
    assert data[-1].item() == 0 and data[torch.tensor(4)].item() == 6
    assert rows(b.tolist() for b in DataLoader(several, batch_size=4)) == wanted
    spawned = DataLoader(data, batch_size=12, num_workers=1, multiprocessing_context="spawn")
    assert rows(b.tolist() for b in spawned) == wanted


def test_a_wrapped_stream_leaves_out():
    quarantine = Quarantine(None)
    stream = wrap(Stream(6), quarantine)
    assert isinstance(stream, IterableDataset) and stream.size == 6
    quarantine.add([bad(0, size=None, hash=sample_hash(torch.tensor([2.0]))), bad(4, size=None)])
    assert rows(b.tolist() for b in DataLoader(stream, batch_size=2)) == [0, 1, 3, 5]


def test_all_quarantined(caplog):
    quarantine = Quarantine(None)
    quarantine.add([bad(i, size=2) for i in range(2)])
    with caplog.at_level(logging.WARNING, "nanproof"):
        assert wrap(Numbers(2, random_numbers=False), quarantine)[1].item() == 1
    assert "none is left out" in caplog.text
    assert list(wrap(DataLoader(Numbers(2)), quarantine)) == []


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_torchdata_keeps_its_own_position():
    """A loader with a state of its own is asked for it; over a map-style dataset, samples are left out as ever."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    class Counting(Stream):
        """Goes on by itself from where it was."""

        at = 0

        def __iter__(self):
            while self.at < self.size:
                self.at += 1
                yield torch.tensor([float(self.at - 1)])
            self.at = 0

        def state_dict(self):
            return {"at": self.at}

        def load_state_dict(self, state):
            self.at = state["at"]

    def make():
        return wrap(stateful.StatefulDataLoader(Counting(), batch_size=4), Quarantine(None))

    loader, found, rewound = make(), [], False
    for batch in loader:
        found.append(rows([batch.tolist()]))
        if len(found) == 2 and not rewound:
            state = carried(loader.state_dict())
        if len(found) == 4 and not rewound:
            rewound = True
            loader.rewind(state)
            del found[2:]
    assert [row for batch in found for row in batch] == list(range(SIZE))
    fresh = make()
    fresh.load_state_dict(state)
    assert rows(b.tolist() for b in fresh) == list(range(8, SIZE))
    between = carried(fresh.state_dict())
    later = make()
    later.load_state_dict(between)
    assert later.epoch == 1 and rows(b.tolist() for b in later) == list(range(SIZE))
    assert rows(b.tolist() for b in fresh) == list(range(SIZE))

    quarantine = Quarantine(None)
    quarantine.add([bad(3)])
    for workers in (0, 2):
        seed_all(7)
        mapped = wrap(stateful.StatefulDataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers), quarantine)
        first = list(mapped)
        assert sorted(rows(b.tolist() for b in first)) == [n for n in range(SIZE) if n != 3]
        it = iter(mapped)
        second = [rows([next(it).tolist()]) for _ in range(2)]
        state = carried(mapped.state_dict())
        second += [rows([b.tolist()]) for b in it]
        fresh = wrap(stateful.StatefulDataLoader(Numbers(), batch_size=4, shuffle=True, num_workers=workers), quarantine)
        fresh.load_state_dict(state)
        assert fresh.epoch == 1
        assert [rows([b.tolist()]) for b in fresh] == second[2:]


def test_sequential_order_has_no_secret_state():
    """The sampler of the copy is ours; the user's loader keeps its own."""
    bare = DataLoader(Numbers(), batch_size=4)
    wrapped = wrap(bare, Quarantine(None))
    assert isinstance(wrapped, WrappedLoader) and isinstance(bare.sampler, SequentialSampler)
    assert type(bare.batch_sampler) is BatchSampler
