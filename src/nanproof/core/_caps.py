"""How much refusing is too much. A guard that skips for ever hides a bug."""

from __future__ import annotations

from collections import deque
from typing import Any

from nanproof._policy import Policy


class SkipCaps:
    """Counts refused steps, in a row and over a window."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._window: deque[bool] = deque(maxlen=policy.skip_window)
        self.in_a_row = 0

    def accepted(self) -> None:
        self.in_a_row = 0
        self._window.append(False)

    def refused(self) -> None:
        """Count a refused step."""
        self.in_a_row += 1
        self._window.append(True)

    def if_refused(self) -> str | None:
        """The setting of the policy whose limit one more refused step goes over, if any."""
        window = list(self._window)[-(self._policy.skip_window - 1) :] if self._policy.skip_window > 1 else []
        if self.in_a_row + 1 > self._policy.max_consecutive_skips:
            return "max_consecutive_skips"
        if sum(window) + 1 > self._policy.max_skip_rate * self._policy.skip_window:
            return "max_skip_rate"
        return None

    def count(self, cap: str) -> int:
        """How many refused steps a limit is about."""
        return sum(self._window) if cap == "max_skip_rate" else self.in_a_row

    def state_dict(self) -> dict[str, Any]:
        return {"window": list(self._window), "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._window = deque(state["window"], maxlen=self._policy.skip_window)
        self.in_a_row = state["in_a_row"]
