"""How much refusing is too much. A guard that skips for ever hides a bug."""

from __future__ import annotations

from collections import deque
from typing import Any

from nanproof.policy import Policy


class SkipCaps:
    """Counts refused steps, in a row and over a window."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._window: deque[bool] = deque(maxlen=policy.skip_window)
        self.in_a_row = 0

    def accepted(self) -> None:
        self.in_a_row = 0
        self._window.append(False)

    def refused(self) -> str | None:
        """Count a refused step; says why the cap is reached, if it is."""
        self.in_a_row += 1
        self._window.append(True)
        policy, skips = self._policy, sum(self._window)
        if self.in_a_row > policy.max_consecutive_skips:
            return f"{self.in_a_row} steps in a row were refused (max_consecutive_skips={policy.max_consecutive_skips})"
        if skips > policy.max_skip_rate * policy.skip_window:
            return f"{skips} of the last {len(self._window)} steps were refused (max_skip_rate={policy.max_skip_rate:g})"
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"window": list(self._window), "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._window = deque(state["window"], maxlen=self._policy.skip_window)
        self.in_a_row = state["in_a_row"]
