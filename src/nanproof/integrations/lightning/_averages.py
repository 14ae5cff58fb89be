"""What Lightning averages over an epoch, without what refused steps logged.

One NaN makes the mean of a whole epoch NaN, and `EarlyStopping` ends a run over that although the step was refused. The sums are
replaced at every `self.log`, never written in place, so keeping the last ones costs nothing; after a refusal the newest finite
one is put back. What is logged for each step stays as it was: the NaN is there to be seen.

Private to Lightning: `trainer._results` and the `value`, `cumulated_batch_size` and `_computed` of what is in it.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import Tensor

Sums = dict[str, tuple[Tensor, Any]]
"""By the name of what was logged: its sum, and over how many samples."""


class EpochAverages:
    """The sums as they were before each of the last batches."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._before: deque[Sums] = deque()

    def note(self, first: bool, keep: int) -> None:
        """Before a batch; `first`: of its epoch, so that sums of the one before are of no use. `keep`: batches whose verdict may
        be still to come."""
        if first:
            self._before.clear()
        self._before.append({} if first else {name: (m.value, _samples(m)) for name, m in self._sums()})
        while len(self._before) > keep:
            self._before.popleft()

    def leave_out(self) -> None:
        """A step was refused: put back the sums that it spoiled. Reads them: for failures."""
        for name, metric in self._sums():
            if torch.isfinite(metric.value):
                continue
            good = next((b[name] for b in reversed(self._before) if name in b and torch.isfinite(b[name][0])), None)
            if good is None:
                metric.reset()
                continue
            metric.value = good[0]
            if good[1] is not None:
                metric.cumulated_batch_size = good[1]
            metric._computed = None

    def _sums(self) -> list[tuple[str, Any]]:
        results = getattr(self._trainer, "_results", None) or {}
        return [(name, m) for name, m in results.items() if m.is_tensor and m.meta.on_epoch]


def _samples(metric: Any) -> Any:
    return getattr(metric, "cumulated_batch_size", None)
