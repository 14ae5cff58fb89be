"""What a step does to the weights: exact where all of a parameter is sampled, close where some of it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanproof
from nanproof import Observe, StepRecord
from nanproof._records import ABSENT
from nanproof.observe._weights import ELEMENTS
from toys import OPTIMIZERS, batches, mse, poison

EVERY = Observe(modules="*", every=1)


def slow(before: Tensor, after: Tensor, lr: float) -> dict[str, float]:
    """From every element."""
    old, new = before.double(), after.double()
    change = (new - old).square().mean().sqrt().item()
    size = old.square().mean().sqrt().item()
    return {
        "ratio": change / size if size > 0 else ABSENT,
        "changed": (old != new).double().mean().item(),
        "over_lr": change / lr,
    }


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[Any], loss: Any = mse, **kwargs: Any) -> Any:
    """Records, and for each what every element of every parameter says."""
    oracle = []
    with nanproof.Guard(model, optimizer, loss_fn=loss, observe=EVERY, **kwargs) as guard:
        names = {id(p): n for n, p in model.named_parameters()}
        for batch in data:
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            guard.train_step(batch)
            after = dict(model.named_parameters())
            rates = {names[id(p)]: g["lr"] for g in optimizer.param_groups for p in g["params"]}
            oracle.append({n: slow(before[n], after[n], rates[n]) for n in rates})
    return guard.history, oracle


def check(record: StepRecord, wanted: dict[str, dict[str, float]], tolerance: float = 1e-4) -> None:
    assert record.observed is not None and set(record.observed.updates) == {"ratio", "changed", "over_lr"}
    assert set(record.names) == set(wanted)
    for name, columns in wanted.items():
        i = record.names.index(name)
        found = {key: values[i] for key, values in record.observed.updates.items()}
        assert found == pytest.approx(columns, rel=tolerance, abs=1e-9), (record.step, name)


def small() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    nn.init.zeros_(model[2].bias)
    return model


@pytest.mark.parametrize("name", ["SGD-foreach", "AdamW-foreach", "AdamW-fused", "Lion"])
def test_small_parameters_are_exact(name):
    """Refused steps too, which move nothing; and a bias of zeros has no ratio."""
    data = batches(5)
    data[2] = poison(data[2])
    model = small()
    history, oracle = steps(model, OPTIMIZERS[name](model.parameters()), data)
    for record, wanted in zip(history, oracle, strict=True):
        check(record, wanted)
    assert history[2].action == "skipped" and history[2].observed is not None
    assert set(history[2].observed.updates["changed"]) == {0.0}
    first = history[0].observed
    assert first is not None and first.updates["ratio"][3] == ABSENT and first.updates["over_lr"][3] > 0


def test_steps_that_a_bad_one_held_up_are_seen_as_they_were_taken():
    data = batches(8)
    data[3] = poison(data[3])
    runs = []
    for given in (data, data[:3] + data[4:]):
        model = small()
        policy = nanproof.Policy(lag=2)
        guard = nanproof.Guard(model, torch.optim.AdamW(model.parameters(), 1e-2), loss_fn=mse, observe=EVERY, policy=policy)
        with guard:
            for batch in given:
                guard.train_step(batch)
        runs.append([r.observed.updates for r in guard.history if r.observed and r.action != "skipped"])
    assert runs[0] == runs[1]


def test_groups_have_learning_rates_of_their_own():
    model = small()
    optimizer = torch.optim.SGD([{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters(), "lr": 1e-3}])
    history, oracle = steps(model, optimizer, batches(3))
    for record, wanted in zip(history, oracle, strict=True):
        check(record, wanted)


def test_large_parameters_are_sampled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(300, 200))
    data = [[torch.randn(16, 300), torch.randn(16, 200)] for _ in range(3)]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    history, oracle = steps(model, torch.optim.AdamW(model.parameters(), 1e-3), data, loss)
    for record, wanted in zip(history, oracle, strict=True):
        # four standard deviations of the RMS of 235 values
        check(record, wanted, tolerance=4 * (2 * (60000 // -(-60000 // ELEMENTS))) ** -0.5)


def test_updates_that_round_away():
    """bf16 weights of 1, and a learning rate that is far below their resolution."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 4, bias=False)).bfloat16()
    nn.init.ones_(model[0].weight)
    for lr, expected in ((1e-5, 0.0), (0.1, 1.0)):
        x = [torch.randn(8, 64).bfloat16(), torch.ones(8, 4).bfloat16()]
        optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)
        history, oracle = steps(model, optimizer, [x, x], lambda m, b: F.mse_loss(m(b[0]).float(), b[1].float()))
        for record, wanted in zip(history, oracle, strict=True):
            assert record.observed is not None
            assert record.observed.updates["changed"][0] == pytest.approx(wanted["0.weight"]["changed"], abs=0.05)
            assert record.observed.updates["changed"][0] == pytest.approx(expected, abs=0.05)


def test_double_weights_are_compared_in_double():
    """A change that single precision does not see."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 1)).double()
    data = [[x.double(), y.double()] for x, y in batches(2)]
    loss = lambda m, b: F.mse_loss(m(b[0]).squeeze(-1), b[1])  # noqa: E731
    history, oracle = steps(model, torch.optim.SGD(model.parameters(), 1e-10), data, loss)
    for record, wanted in zip(history, oracle, strict=True):
        check(record, wanted)
        assert record.observed is not None and list(record.observed.updates["changed"]) == [1.0, 1.0]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.positions, self.head = nn.Embedding(40, 8), nn.Embedding(5, 8), nn.Linear(8, 1)
        self.frozen = nn.Embedding(7, 8)
        self.frozen.weight.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.words(ids) + self.positions(torch.arange(ids.shape[1]))).mean((1, 2))


@pytest.mark.parametrize("kind", ["AdamW", "SGD", "momentum", "Adagrad"])
def test_rows_that_never_had_a_gradient(kind):
    """With AdamW, weight decay moves them all the same. Step by step, as more of the words are met."""
    model = Words()
    optimizer = {
        "AdamW": lambda ps: torch.optim.AdamW(ps, 1e-2, weight_decay=0.1),
        "SGD": lambda ps: torch.optim.SGD(ps, 1e-1),
        "momentum": lambda ps: torch.optim.SGD(ps, 1e-1, momentum=0.9),
        "Adagrad": lambda ps: torch.optim.Adagrad(ps, 1e-1),
    }[kind](p for p in model.parameters() if p.requires_grad)
    met: set[int] = set()
    data = [torch.tensor([[0, 1, 2], [2, 1, 0]]), torch.tensor([[3, 0, 4], [5, 5, 5]]), torch.tensor([[1, 1, 1], [39, 38, 0]])]
    with nanproof.Guard(model, optimizer, loss_fn=lambda m, b: (m(b) - 1).square().mean(), observe=EVERY) as guard:
        for ids in data:
            guard.train_step(ids)
            met |= set(ids.reshape(-1).tolist())
            seen = guard.history[-1].observed
            assert seen is not None
            assert seen.unmoved == pytest.approx({"words": 1 - len(met) / 40, "positions": 2 / 5})


def test_rows_are_sampled_in_large_embeddings():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5000, 4), nn.Linear(4, 1))
    ids = torch.randperm(5000)[:2500]
    with nanproof.Guard(
        model, torch.optim.AdamW(model.parameters(), 1e-2), loss_fn=lambda m, b: m(b).square().mean(), observe=EVERY
    ) as guard:
        guard.train_step(ids)
        guard.train_step(torch.arange(5000))
    first, second = (r.observed.unmoved["0"] for r in guard.history if r.observed)
    assert first == pytest.approx(0.5, abs=0.06) and second == 0


def test_parameters_added_later():
    model = small()
    first, last = list(model[0].parameters()), list(model[2].parameters())
    optimizer = torch.optim.SGD(first, 0.1)
    oracle = []
    names = {id(p): n for n, p in model.named_parameters()}
    with nanproof.Guard(model, optimizer, loss_fn=mse, observe=EVERY) as guard:
        for i, batch in enumerate(batches(4)):
            if i == 2:
                optimizer.add_param_group({"params": last, "lr": 0.01})
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            guard.train_step(batch)
            rates = {names[id(p)]: g["lr"] for g in optimizer.param_groups for p in g["params"]}
            oracle.append({n: slow(before[n], dict(model.named_parameters())[n], lr) for n, lr in rates.items()})
    assert [len(r.names) for r in guard.history] == [2, 2, 4, 4]
    for record, wanted in zip(guard.history, oracle, strict=True):
        check(record, wanted)


def test_weights_that_were_put_elsewhere_are_found_again():
    """`p.data = ...`, as when a model is moved or weights are loaded into new memory."""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with nanproof.Guard(model, optimizer, loss_fn=mse, observe=EVERY) as guard:
        for i, batch in enumerate(batches(4)):
            if i == 2:
                for p in model.parameters():
                    p.data = p.data.clone() * 2
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            guard.train_step(batch)
            check(guard.history[-1], {n: slow(before[n], p, 0.1) for n, p in model.named_parameters()})


def test_channels_last_and_frozen_parameters():
    """A weight is sampled in whatever order it lies in memory; one that is frozen is absent."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(4, 1))
    model[2].bias.requires_grad_(False)
    optimizer, lr = torch.optim.SGD(model.parameters(), 0.1), 0.1
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with nanproof.Guard(model, optimizer, loss_fn=lambda m, b: m(b).square().mean(), observe=EVERY) as guard:
        guard.train_step(torch.randn(2, 3, 3, 3))
    wanted = {n: slow(before[n], p, lr) for n, p in model.named_parameters()}
    wanted["2.bias"] = dict.fromkeys(("ratio", "changed", "over_lr"), ABSENT)
    check(guard.history[0], wanted)


def test_large_channels_last_weights_are_sampled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(32, 64, 3), nn.Flatten()).to(memory_format=torch.channels_last)
    optimizer, lr = torch.optim.Adam(model.parameters(), 1e-3), 1e-3
    before = model[0].weight.detach().clone()
    with nanproof.Guard(model, optimizer, loss_fn=lambda m, b: m(b).square().mean(), observe=EVERY) as guard:
        guard.train_step(torch.randn(2, 32, 3, 3))
    record = guard.history[0]
    assert record.observed is not None and model[0].weight.numel() > 8 * ELEMENTS
    found = {key: values[record.names.index("0.weight")] for key, values in record.observed.updates.items()}
    assert found == pytest.approx(slow(before, model[0].weight, lr), rel=0.2)


@pytest.mark.parametrize("lag", [0, 2])
def test_layers_that_are_unfrozen_later_come_in(lag):
    model = small()
    model[0].requires_grad_(False)
    optimizer, oracle = torch.optim.SGD(model.parameters(), 0.1), []
    absent = dict.fromkeys(("ratio", "changed", "over_lr"), ABSENT)
    with nanproof.Guard(model, optimizer, loss_fn=mse, observe=EVERY, policy=nanproof.Policy(lag=lag)) as guard:
        for i, batch in enumerate(batches(5)):
            if i == 2:
                model[0].requires_grad_(True)
            before = {n: p.detach().clone() for n, p in model.named_parameters()}
            guard.train_step(batch)
            moved = model.named_parameters()
            oracle.append({n: slow(before[n], p, 0.1) if p.requires_grad else absent for n, p in moved})
    for record, wanted in zip(guard.history, oracle, strict=True):
        check(record, wanted)


def test_weights_can_be_left_alone_and_light_looks_see_none():
    for observe, wanted in ((Observe(every=1, weights=False), [False] * 4), (Observe(every=2), [True, False, True, False])):
        model = small()
        with nanproof.Guard(model, torch.optim.SGD(model.parameters(), 0.1), loss_fn=mse, observe=observe) as guard:
            for batch in batches(4):
                guard.train_step(batch)
        assert [bool(r.observed and r.observed.updates) for r in guard.history] == wanted
