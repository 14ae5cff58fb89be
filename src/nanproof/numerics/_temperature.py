"""Temperature that cannot overflow: logits / temperature where that is finite, and relative to the row's maximum where it is not.

A softmax needs only differences to the maximum, so a very small temperature is no reason for Inf: in the limit the largest
logit, or each of several equal ones, takes everything.
"""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from nanproof._errors import UsageError

log = logging.getLogger("nanproof")

_SMALLEST = 1e-38
"""Of fp32. A smaller temperature is computed as this one: its reciprocal would be Inf, and 0 * Inf is NaN."""


class TemperatureLogitsWarper:
    """Divides logits by a temperature, for `generate(logits_processor=[...])` or a sampling loop. Leave the temperature of
    `generate` itself at 1.0 then: it would divide once more.

    Bit-identical to the warper of transformers in every row where that stays finite. In a row where it would overflow, the logits
    are first taken relative to the row's maximum, in fp32: the maximum becomes 0, ties stay ties, bans stay bans. A NaN, a +Inf
    and a row of nothing but -inf stay what they are, for `NumericalStabilityLogitsProcessor` to find. Nothing waits for the
    device.

    Args:
        temperature: above 0 and finite. For greedy decoding use `do_sample=False`.
        min_temperature: a smaller temperature is raised to this one, with a warning: at 0.1, who asks for 0.01 gets 0.1. With two
            logits 0.2 apart, that is 0.881/0.119 in the place of 1.000/2e-9. Not needed for safety; None leaves the temperature
            alone.
        verbose: log the temperature that is used.
    """

    def __init__(self, temperature: float = 1.0, min_temperature: float | None = None, verbose: bool = False) -> None:
        asked = _positive("temperature", temperature)
        least = 0.0 if min_temperature is None else _positive("min_temperature", min_temperature)
        self.temperature = max(asked, least)
        """The one that is used."""
        self.min_temperature = min_temperature
        if self.temperature != asked:
            log.warning(
                "nanproof: temperature %g was raised to min_temperature %g, which makes the distribution flatter", asked, least
            )
        elif verbose:
            log.info("nanproof: logits are divided by temperature %g", self.temperature)

    def __call__(self, input_ids: Tensor | None, scores: Tensor) -> Tensor:
        if not isinstance(scores, Tensor) or not scores.is_floating_point() or scores.dim() < 1:
            raise UsageError("TemperatureLogitsWarper: scores must be a tensor of floating-point logits, one row per sequence")
        if self.temperature == 1.0:
            return scores
        if self.temperature > 1.0:
            return scores / self.temperature  # cannot overflow
        temperature = max(self.temperature, _SMALLEST)
        # What is not finite passes through: its base is 0. So is that of a row whose maximum can be divided: x - x is 0 for every
        # finite x, and NaN for all others.
        base = scores.detach().amax(-1, keepdim=True).nan_to_num_(0.0, 0.0, 0.0)
        reach = base / temperature
        base.masked_fill_((reach - reach) == 0, 0.0)
        wide = torch.promote_types(scores.dtype, torch.float32)
        # Minus 0 changes no bit, and one rounding at the end is what division in half precision does as well.
        return (scores.to(wide) - base.to(wide)).div_(temperature).to(scores.dtype)

    def __repr__(self) -> str:
        return f"TemperatureLogitsWarper(temperature={self.temperature:g})"


def _positive(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        greedy = "; for greedy decoding use do_sample=False" if value == 0 else ""
        raise UsageError(f"TemperatureLogitsWarper({name}={value!r}): a finite number above 0 is needed{greedy}")
    return float(value)
