"""Stopping: whether a signal asked the run to stop, decided alike on all ranks."""

from __future__ import annotations

import time

from nanproof.core.support._ranks import Ranks
from nanproof.core.support._signals import Preemption

EVERY = 2.0
"""Seconds between two exchanges of several ranks, about."""


class Stopping:
    """Asked between steps. A single process answers at once.

    Several ranks get a signal at different moments, or only one of them does. They exchange what they know every few steps: at
    each exchange, rank 0's speed says at which step the next one is, so that all ranks come to it at the same step.
    """

    def __init__(self, preemption: Preemption, ranks: Ranks) -> None:
        self.preemption, self._ranks = preemption, ranks
        self._next = 0
        self._last = (time.monotonic(), -1)

    @property
    def requested(self) -> str:
        """The name of the signal that this process got, or ""."""
        return self.preemption.requested

    def asked(self, step: int) -> bool:
        """Return whether to stop before this step. With several ranks a collective, every few steps."""
        if not self._ranks.together:
            return bool(self.preemption.requested)
        if step < self._next:
            return False
        now, (then, before) = time.monotonic(), self._last
        self._last = now, step
        pace = (step - before) / max(now - then, 1e-6)
        told = self._ranks.gather([bool(self.preemption.requested), pace])
        self._next = step + max(1, int(EVERY * told[min(told)][1]))
        return any(flag for flag, _ in told.values())
