"""After going back, the learning rate can climb from near 0 to its schedule again, without the schedule knowing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from nanproof.core.support._members import groups_of


class Rewarm:
    """Lowers the rate around the optimizer's step, and puts it back right after."""

    def __init__(self, optimizer: Any, steps: int) -> None:
        self._optimizer, self._steps = optimizer, steps
        self._since: int | None = None
        self._lowered: list[tuple[dict[str, Any], Any]] = []

    def start(self, step: int) -> None:
        self._since = step if self._steps else None

    def state_dict(self) -> dict[str, Any]:
        return {"since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._since = state["since"] if self._steps else None

    def before_step(self, step: int) -> None:
        self.restore()
        if self._since is None:
            return
        share = (step - self._since + 1) / (self._steps + 1)
        if share >= 1:
            self._since = None
            return
        for group in groups_of(self._optimizer):
            if "lr" not in group:
                continue
            rate = group["lr"]
            self._lowered.append((group, rate.clone() if isinstance(rate, Tensor) else rate))
            if isinstance(rate, Tensor):
                rate.mul_(share)
            else:
                group["lr"] = rate * share

    def restore(self) -> None:
        for group, rate in self._lowered:
            if isinstance(rate, Tensor):
                group["lr"].copy_(rate)
            else:
                group["lr"] = rate
        self._lowered.clear()
