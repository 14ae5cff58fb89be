"""What a step does to the weights: how far each parameter moved, which share of it at all, and embedding rows that never had a
gradient. From a few hundred elements of each parameter and a thousand rows of each embedding, on full looks only.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nanproof._records import ABSENT
from nanproof.core._telemetry import Courier
from nanproof.core.judge._parameters import Parameters, clean_name, fills_its_memory, local, unwrap
from nanproof.core.support._members import state_of
from nanproof.observe._kernels import ElementReader

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

    def __init__(self, model: nn.Module, parameters: Parameters, optimizer: Any) -> None:
        self._parameters, self._optimizer = parameters, optimizer
        self._courier = Courier(parameters.device)
        self._model = model
        self._first: dict[str, Tensor] = {}
        """To tell which rows moved where the optimizer keeps no second moment."""
        self._choose()

    def _choose(self) -> None:
        """What is trained now; a layer that is unfrozen later comes in with its first full look."""
        tensors = self._parameters.tensors
        self._trained = [p.requires_grad for p in tensors]
        self._places = [i for i, p in enumerate(tensors) if _can_be_sampled(p)]
        trained = {id(p) for p in tensors}
        self._embeddings = [
            (clean_name(name), m.weight)
            for name, m in unwrap(self._model).named_modules()
            if isinstance(m, nn.Embedding) and id(m.weight) in trained and m.weight.requires_grad and _can_be_sampled(m.weight)
        ]
        self._first = {name: self._first[name] if name in self._first else _row_sums(w) for name, w in self._embeddings}
        self._find_elements()

    def _find_elements(self) -> None:
        """Views of the elements that are looked at, and two rows to copy them to for each parameter."""
        tensors, device = [local(self._parameters.tensors[i].detach()) for i in self._places], self._parameters.device
        self._memory = [t.data_ptr() for t in tensors]
        self._elements = [_spread(t) for t in tensors]
        self._before, self._after = torch.zeros(2, len(tensors), ELEMENTS, device=device, dtype=self._parameters.dtype).unbind()
        counts = [e.shape[0] for e in self._elements]
        self._slots = {
            id(rows): [r[:n] for r, n in zip(rows.unbind(), counts, strict=True)] for rows in (self._before, self._after)
        }
        can_read = bool(tensors) and self._before.dtype == torch.float32 and ElementReader.can_read(tensors)
        self._reader = ElementReader(tensors, ELEMENTS) if can_read else None
        self._counts = torch.tensor(counts, dtype=torch.float32).to(device)
        self._taken = False

    def outdated(self, parameters: Parameters) -> bool:
        """Parameters were added to the optimizer since."""
        return parameters is not self._parameters

    def before(self) -> None:
        if self._trained != [p.requires_grad for p in self._parameters.tensors]:
            self._choose()
        elif self._memory != [local(self._parameters.tensors[i]).data_ptr() for i in self._places]:
            self._find_elements()
        if self._places:
            self._taken = True
            self._read(self._before)

    def forget(self) -> None:
        self._taken = False

    def after(self) -> Callable[[], Moved] | None:
        """What the step did; to be read later."""
        if not self._taken:
            return None
        self._taken = False
        self._read(self._after)
        change, device = self._after - self._before, self._parameters.device
        sums = (
            torch.stack(((change != 0).to(change.dtype).sum(1), change.square().sum(1), self._before.square().sum(1)))
            / self._counts
        )
        sums[1:].sqrt_()
        unmoved = [self._never_moved(name, weight).to(device, non_blocking=True) for name, weight in self._embeddings]
        places, names, count = self._places, [name for name, _ in self._embeddings], len(self._parameters.tensors)
        parcel = self._courier.send(torch.cat([sums.flatten(), *(share.reshape(1) for share in unmoved)]))

        def read() -> Moved:
            values, n = parcel(), len(places)
            columns = []
            for column in range(3):
                columns.append(array("d", (ABSENT,)) * count)
                for i, value in zip(places, values[column * n : (column + 1) * n], strict=True):
                    columns[-1][i] = value
            changed, update, weight = columns
            return Moved(changed, update, weight, dict(zip(names, values[3 * n :], strict=True)))

        return read

    def _read(self, rows: Tensor) -> None:
        if self._reader is not None:
            self._reader.read(rows)
        else:
            torch._foreach_copy_(self._slots[id(rows)], self._elements)

    def _never_moved(self, name: str, weight: Tensor) -> Tensor:
        second = state_of(self._optimizer, weight).get("exp_avg_sq")
        if isinstance(second, Tensor) and second.shape == weight.shape:
            return (_rows(second).amax(1) == 0).float().mean()
        return (_row_sums(weight) == self._first[name]).float().mean()


def _spread(tensor: Tensor) -> Tensor:
    """Elements spread over the memory of a tensor, in whatever order it lies there."""
    flat = tensor.view(-1) if tensor.is_contiguous() else tensor.as_strided((tensor.numel(),), (1,))
    return flat[:: -(-flat.shape[0] // ELEMENTS)]


def _rows(matrix: Tensor) -> Tensor:
    here = local(matrix.detach())
    return here[:: max(1, here.shape[0] // ROWS)]


def _row_sums(weight: Tensor) -> Tensor:
    return _rows(weight).float().sum(1)


def _can_be_sampled(p: Tensor) -> bool:
    here = local(p)
    return p.requires_grad and p.is_floating_point() and here.numel() > 0 and fills_its_memory(here)
