"""What a step consumes besides its batch: random numbers, and the schedule. Saved before a step so that a refused one
leaves no trace in them."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class RandomState:
    """States of torch's generators (CPU and the devices in use) and Python's. None of these reads waits for a device."""

    states: dict[str, Any]

    @classmethod
    def now(cls, devices: Iterable[torch.device]) -> RandomState:
        states: dict[str, Any] = {"python": random.getstate(), "cpu": torch.get_rng_state()}
        for device in devices:
            states[str(device)] = torch.get_device_module(device).get_rng_state(device)
        return cls(states)

    def restore(self) -> None:
        for name, state in self.states.items():
            if name == "python":
                random.setstate(state)
            elif name == "cpu":
                torch.set_rng_state(state)
            else:
                device = torch.device(name)
                torch.get_device_module(device).set_rng_state(state, device)

    def moved_since(self, earlier: RandomState) -> set[str]:
        """The generators that gave out numbers in between."""
        return {name for name, state in self.states.items() if not _same(state, earlier.states.get(name))}

    def only(self, names: set[str]) -> RandomState:
        return RandomState({name: state for name, state in self.states.items() if name in names})


def _same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Every group's settings (learning rate, betas, ...), and the state of the schedule that sets them.

    A scheduler's `load_state_dict` does not put the learning rate back, hence both.
    """

    groups: list[dict[str, Any]]
    schedule: Any

    @classmethod
    def now(cls, optimizer: Optimizer, scheduler: Any) -> Hyperparameters:
        groups = [{k: _clone(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        return cls(groups, None if scheduler is None else copy.deepcopy(scheduler.state_dict()))

    def restore(self, optimizer: Optimizer, scheduler: Any) -> None:
        if scheduler is not None:
            scheduler.load_state_dict(copy.deepcopy(self.schedule))
        for group, saved in zip(optimizer.param_groups, self.groups, strict=True):
            for key, value in saved.items():
                if isinstance(group.get(key), Tensor):
                    group[key].copy_(value)
                else:
                    group[key] = value


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def learning_rates(optimizer: Optimizer) -> tuple[float | Tensor, ...]:
    """One a group; a tensor is cloned, not read."""
    return tuple(_clone(group.get("lr", 0.0)) for group in optimizer.param_groups)
