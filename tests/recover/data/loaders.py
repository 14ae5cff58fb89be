"""Data, samplers and loaders of all kinds, and a training that draws random numbers, for the tests of wrapped data."""

import io
import random

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from nanproof.core.support._context import RandomState
from nanproof.recover.data._loaders import wrap
from nanproof.recover.data._quarantine import Entry, Quarantine

SIZE = 23


class Numbers(Dataset):
    """Sample i is (i, a number drawn when it was fetched)."""

    def __init__(self, size=SIZE, random_numbers=True):
        self.size, self.random_numbers, self.fetched = size, random_numbers, 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.fetched += 1
        if not self.random_numbers:
            return torch.tensor([float(index)])
        return torch.tensor([float(index), torch.rand(()).item(), random.random(), np.random.rand()])  # noqa: NPY002


class Stream(IterableDataset):
    """Numbers from 0, shared out among the workers, optionally in an order that each draws."""

    def __init__(self, size=SIZE, shuffled=False):
        self.size, self.shuffled = size, shuffled

    def __iter__(self):
        info = get_worker_info()
        numbers = list(range(self.size)) if info is None else list(range(info.id, self.size, info.num_workers))
        if self.shuffled:
            numbers = [numbers[i] for i in torch.randperm(len(numbers)).tolist()]
        for number in numbers:
            yield torch.tensor([float(number)])


class Eager(Sampler):
    """Draws its order when it is asked for an iterator, not at the first batch, and counts its epochs itself."""

    def __init__(self):
        self.epoch = 0

    def __iter__(self):
        self.epoch += 1
        numbers = list(range(SIZE))
        random.shuffle(numbers)
        return iter([n for n in numbers if n % (self.epoch + 3)])

    def __len__(self):
        return SIZE


class EagerBatches(Eager):
    """The same as a batch sampler: a loader with workers asks it for two iterators."""

    def __iter__(self):
        return iter([[n] * 2 for n in super().__iter__()])


class Drawing(Sampler):
    """Draws from a generator of its own all through the epoch."""

    def __init__(self, rng):
        self.rng = rng

    def __iter__(self):
        for _ in range(SIZE):
            yield int(self.rng.integers(SIZE)) if hasattr(self.rng, "integers") else self.rng.randrange(SIZE)

    def __len__(self):
        return SIZE


class Buckets(Sampler):
    """A batch sampler of the user's own, with batches of different sizes."""

    def __iter__(self):
        order = torch.randperm(SIZE).tolist()
        while order:
            size = 1 + len(order) % 4
            yield order[:size]
            order = order[size:]

    def __len__(self):
        return 9


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def weights():
    return [1.0 + i % 3 for i in range(SIZE)]


LOADERS = {
    "sequential": lambda **more: DataLoader(Numbers(), batch_size=4, **more),
    "drop last": lambda **more: DataLoader(Numbers(), batch_size=4, shuffle=True, drop_last=True, **more),
    "random": lambda **more: DataLoader(Numbers(), batch_size=5, shuffle=True, **more),
    "random, own generator": lambda **more: DataLoader(Numbers(), batch_size=5, shuffle=True, generator=seeded(3), **more),
    "random, its sampler's generator": lambda **more: DataLoader(
        Numbers(), batch_size=5, sampler=RandomSampler(range(SIZE), replacement=True, num_samples=70, generator=seeded(4)), **more
    ),
    "weighted": lambda **more: DataLoader(Numbers(), batch_size=4, sampler=WeightedRandomSampler(weights(), 18), **more),
    "subset": lambda **more: DataLoader(Numbers(), batch_size=4, sampler=SubsetRandomSampler(range(3, 20)), **more),
    "buckets": lambda **more: DataLoader(Numbers(), batch_sampler=Buckets(), **more),
    "nested": lambda **more: DataLoader(
        Numbers(), batch_sampler=BatchSampler(RandomSampler(range(SIZE), generator=seeded(5)), 6, drop_last=False), **more
    ),
    "no batches": lambda **more: DataLoader(Numbers(9), batch_size=None, sampler=RandomSampler(range(9)), **more),
    "batches as samples": lambda **more: DataLoader(
        Numbers(random_numbers=False),
        batch_size=None,
        collate_fn=lambda x: x,
        sampler=BatchSampler(RandomSampler(range(SIZE)), 4, drop_last=False),
        **more,
    ),
    "distributed": lambda **more: DataLoader(
        Numbers(), batch_size=2, sampler=DistributedSampler(range(SIZE), num_replicas=3, rank=1), **more
    ),
    "eager": lambda **more: DataLoader(Numbers(), batch_size=4, sampler=Eager(), **more),
    "eager batches": lambda **more: DataLoader(Numbers(), batch_sampler=EagerBatches(), **more),
    "drawing, Python": lambda **more: DataLoader(Numbers(), batch_size=4, sampler=Drawing(random.Random(1)), **more),
    "drawing, NumPy": lambda **more: DataLoader(Numbers(), batch_size=4, sampler=Drawing(np.random.default_rng(1)), **more),
    "drawing, Mersenne": lambda **more: DataLoader(
        Numbers(), batch_size=4, sampler=Drawing(np.random.Generator(np.random.MT19937(2))), **more
    ),
    "stream": lambda **more: DataLoader(Stream(), batch_size=4, **more),
    "stream, no batches": lambda **more: DataLoader(Stream(9), batch_size=None, **more),
    "list": lambda **more: [torch.full((3, 1), float(i)) for i in range(7)],
}


EXACT = sorted(LOADERS)


def _several_indices(self, indices):
    return torch.tensor([[float(i)] for i in indices])


def bare(kind, **more):
    """The loader as a user has it."""
    loader = LOADERS[kind](**more)
    if kind == "batches as samples":
        loader.dataset.__class__ = type("Lists", (Numbers,), {"__getitem__": _several_indices})
    return loader


def build(kind, quarantine=None, **more):
    return wrap(bare(kind, **more), quarantine if quarantine is not None else Quarantine(None))


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002


def work():
    """What a step does with the random numbers."""
    return torch.rand(2).sum().item() + random.random()


def tell_epoch(loader, epoch):
    sampler = getattr(loader, "sampler", None)
    if isinstance(sampler, DistributedSampler):
        sampler.set_epoch(epoch)


def train(loader, epochs, first=0):
    """Every step: epoch, batch, what the step drew. Between epochs something else draws, too."""
    for epoch in range(first, epochs):
        tell_epoch(loader, epoch)
        for batch in loader:
            yield epoch, batch.tolist(), work()
        torch.rand(3)


def saved():
    return RandomState.now(())


def carried(state):
    """Through a file, as a checkpoint goes."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def rows(batches):
    return [int(row[0]) if isinstance(row, list) else int(row) for batch in batches for row in batch]


def bad(index, *, size=SIZE, hash=None, worker=None, workers=None):
    return Entry(
        index=index,
        hash=hash,
        size=size,
        worker=worker,
        workers=workers,
        step=1,
        cause="nan",
        bundle=None,
        at="2026-01-01T00:00:00",
    )


def oracle(kind, epochs, **more):
    seed_all(7)
    return list(train(bare(kind, **more), epochs))


def order_of(kind, epochs):
    loader = quiet(build(kind))
    return [list(loader) for _ in range(epochs)]


def quiet(loader):
    if hasattr(loader, "dataset"):  # a list of batches has none
        loader.dataset.random_numbers = False
    return loader
