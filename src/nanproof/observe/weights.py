"""What a step does to the weights: how far each parameter moved, which share of it at all, and embedding rows that never had a
gradient. From a few hundred elements of each parameter and a thousand rows of each embedding, on full looks only.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanproof.core.parameters import Parameters, clean_name, local, unwrap
from nanproof.core.telemetry import Courier
from nanproof.records import ABSENT

ELEMENTS, ROWS = 256, 1024
"""Sampled of each parameter, and of each embedding."""


@dataclass(frozen=True, slots=True)
class Moved:
    """By parameter, in the order of the optimizer's; `ABSENT` for one that was not sampled."""

    changed: array[float]
    """Share of the elements that are not what they were."""
    update: array[float]
    """RMS of the change."""
    weight: array[float]
    """RMS of the weights before it."""
    unmoved: dict[str, float]
    """By embedding: share of the sampled rows that never had a gradient."""


class WeightWatch:
    """Weights before and after a step, on the device until the record is read."""

    def __init__(self, model: nn.Module, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._places = [i for i, p in enumerate(parameters.tensors) if _can_be_sampled(p)]
        self._courier = Courier(parameters.device)
        self._indices: dict[tuple[int, torch.device], Tensor] = {}
        trained = {id(p) for p in parameters.tensors}
        self._embeddings = [
            (clean_name(name), m.weight)
            for name, m in unwrap(model).named_modules()
            if isinstance(m, nn.Embedding) and id(m.weight) in trained and m.weight.requires_grad and _can_be_sampled(m.weight)
        ]
        self._first = {name: self._row_sums(weight) for name, weight in self._embeddings}
        """To tell which rows moved where the optimizer keeps no second moment."""
        self._before: Tensor | None = None

    def outdated(self, parameters: Parameters) -> bool:
        """Parameters were added to the optimizer since."""
        return parameters is not self._parameters

    def before(self) -> None:
        self._before = self._sample()

    def forget(self) -> None:
        self._before = None

    def after(self) -> Callable[[], Moved] | None:
        """What the step did; to be read later."""
        before, self._before = self._before, None
        if before is None:
            return None
        after, device = self._sample(), self._parameters.device
        change = after - before
        rows = [
            (after != before).float().mean(1),
            change.square().mean(1).sqrt(),
            before.square().mean(1).sqrt(),
        ]
        unmoved = [self._never_moved(name, weight).to(device, non_blocking=True) for name, weight in self._embeddings]
        parcel = self._courier.send(torch.cat([*rows, *(share.reshape(1) for share in unmoved)]))

        def read() -> Moved:
            values, n, count = parcel(), len(self._places), len(self._parameters.tensors)
            columns = []
            for column in range(3):
                columns.append(array("d", (ABSENT,)) * count)
                for i, value in zip(self._places, values[column * n : (column + 1) * n], strict=True):
                    columns[-1][i] = value
            names = [name for name, _ in self._embeddings]
            changed, update, weight = columns
            return Moved(changed, update, weight, dict(zip(names, values[3 * n :], strict=True)))

        return read

    def _sample(self) -> Tensor:
        device, found = self._parameters.device, []
        for i in self._places:
            flat = local(self._parameters.tensors[i].detach()).view(-1)
            chosen = flat.take(self._index(flat, ELEMENTS))
            found.append(chosen.to(device, torch.float32, non_blocking=True))
        return torch.stack(found) if found else torch.zeros(0, ELEMENTS, device=device)

    def _index(self, flat: Tensor, count: int) -> Tensor:
        """Places spread over a tensor; a small one is gone through more than once."""
        key = flat.shape[0], flat.device
        if key not in self._indices:
            step = max(1, flat.shape[0] // count)
            self._indices[key] = torch.arange(count, device=flat.device).mul_(step).remainder_(flat.shape[0])
        return self._indices[key]

    def _never_moved(self, name: str, weight: Tensor) -> Tensor:
        second = self._optimizer.state.get(weight, {}).get("exp_avg_sq")
        if isinstance(second, Tensor) and second.shape == weight.shape:
            return (_rows(second).amax(1) == 0).float().mean()
        return (self._row_sums(weight) == self._first[name]).float().mean()

    def _row_sums(self, weight: Tensor) -> Tensor:
        return _rows(weight).float().sum(1)


def _rows(matrix: Tensor) -> Tensor:
    here = local(matrix.detach())
    return here[:: max(1, here.shape[0] // ROWS)]


def _can_be_sampled(p: Tensor) -> bool:
    here = local(p)
    return p.requires_grad and p.is_floating_point() and here.is_contiguous() and here.numel() > 0
