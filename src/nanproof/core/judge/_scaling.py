"""The loss scale of a GradScaler, read and updated on the device.

`scaler.step` is not used: it would unscale in a pass of its own and overwrite the verdict. The two private attributes of
GradScaler used here hold the scale and the count of good steps since it last changed; tests pin them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class LossScale:
    """A GradScaler seen from the guard."""

    def __init__(self, scaler: Any, device: torch.device) -> None:
        self._scaler = scaler
        self._one = torch.ones((), device=device)

    @property
    def untouched(self) -> bool:
        """Nothing was ever scaled with it."""
        return self._scaler._scale is None

    def value(self) -> Tensor:
        """The current scale, as a tensor of its own."""
        return self._scaler.scale(self._one)  # type: ignore[no-any-return]

    def update(self, overflow: Tensor, frozen: Tensor) -> None:
        """Halve after an overflow, grow after enough good steps; where `frozen`, stay as if the step had not been."""
        s = self._scaler
        scale, count = s._scale, s._growth_tracker
        old_scale, old_count = scale.clone(), count.clone()
        torch._amp_update_scale_(
            scale, count, overflow.float(), s.get_growth_factor(), s.get_backoff_factor(), s.get_growth_interval()
        )
        scale.copy_(torch.where(frozen, old_scale, scale))
        count.copy_(torch.where(frozen, old_count, count))

    def tensors(self) -> dict[str, Tensor]:
        """What the scaler knows: empty before the first backward."""
        if self.untouched:
            return {}
        return {"scale": self._scaler._scale, "growth": self._scaler._growth_tracker}

    def put(self, saved: dict[str, Tensor]) -> None:
        """Back to what `tensors` said."""
        if self.untouched:
            self._scaler._lazy_init_scale_growth_tracker(self._one.device)
        self._scaler._scale.copy_(saved["scale"])
        self._scaler._growth_tracker.copy_(saved["growth"])

    def start_over(self) -> None:
        """Back to before the first backward."""
        if not self.untouched:
            self._scaler._scale.fill_(self._scaler._init_scale)
            self._scaler._growth_tracker.fill_(self._scaler._init_growth_tracker)

    @property
    def fixed(self) -> bool:
        """It hardly falls after an overflow: no scale that finds its level by itself."""
        return float(self._scaler.get_backoff_factor()) > 0.95

    def back_off(self) -> None:
        """Halve now: the host found that an overflow was the scale's fault."""
        overflow = torch.ones((), device=self._one.device)
        self.update(overflow, overflow == 0)
