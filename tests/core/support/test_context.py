"""Random numbers and settings are saved and put back exactly."""

import random

import torch
from torch import nn

from nanproof.core.support._context import RandomState, Schedule, changed_settings, settings


def draw():
    return torch.rand(3).tolist(), random.random()


def test_random_numbers_come_again():
    state = RandomState.now([])
    first = draw()
    state.restore()
    assert draw() == first


def test_which_generators_moved_is_known():
    before = RandomState.now([])
    assert RandomState.now([]).moved_since(before) == set()
    torch.rand(1)
    assert RandomState.now([]).moved_since(before) == {"cpu"}
    random.random()
    now = RandomState.now([])
    assert now.moved_since(before) == {"cpu", "python"}
    assert set(now.only({"python"}).states) == {"python"}


def test_settings_and_schedule_are_put_back_in_place():
    lr = torch.tensor(0.5)
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=lr, fused=True)
    scheduler = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [torch.optim.lr_scheduler.ConstantLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)],
        [2],
    )
    tensor = optimizer.param_groups[0]["lr"]
    before, saved = tensor.item(), Schedule.now(optimizer, scheduler)
    rates = []
    for _ in range(2):
        for _ in range(4):
            optimizer.step()
            scheduler.step()
        rates.append(tensor.item())
        saved.restore(optimizer, scheduler)
        assert optimizer.param_groups[0]["lr"] is tensor and tensor.item() == before
    assert rates[0] == rates[1] != before


def test_what_the_user_changed_is_told_from_what_stayed():
    optimizer = torch.optim.AdamW([{"params": nn.Linear(2, 2).parameters()}, {"params": nn.Linear(2, 2).parameters(), "lr": 0.5}])
    before = settings(optimizer)
    optimizer.param_groups[1]["weight_decay"] = 0.7
    assert changed_settings(before, settings(optimizer)) == [{}, {"weight_decay": 0.7}]
