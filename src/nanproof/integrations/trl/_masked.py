"""What GRPO's masked tokens would have done to its loss, said once.

Under nanproof they do nothing: they are equal in all policies before exp. So nobody would learn that the run has tokens whose
log-probabilities are so far apart that TRL's own loss is NaN on them. The first batch of that kind is noted on the device, and
becomes an incident when the trainer logs; after that they are only counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from nanproof._records import Diagnosis, Incident
from nanproof.explain import causes
from nanproof.integrations._protected import ProtectedRun
from nanproof.numerics.rl import Signals

_NAMES = ("overflow_step", "overflow_tokens", "overflow_largest")


class MaskedOverflow:
    """The first batch with masked tokens that overflow. Nothing here waits for the device."""

    def __init__(self, guard: ProtectedRun) -> None:
        self._guard = guard
        self._now: Tensor | None = None
        """Of the batch under way: its step, how many tokens, and the largest log-ratio among them."""
        self._first: Tensor | None = None
        """The same of the first batch that had any; no tokens as long as there was none."""

    def look(self, signals: Signals, new: Tensor, policies: Iterable[Any], keep: Tensor) -> None:
        """At a batch before its loss is computed."""
        apart = [(policy.detach() - new).abs() for policy in policies if isinstance(policy, Tensor)]
        tokens = signals.masked_overflow
        if tokens is None or not apart:
            return
        # NaN says how far apart they are no less than Inf does.
        largest = torch.stack([torch.where(keep, 0.0, gap).nan_to_num(math.inf, math.inf).amax() for gap in apart]).amax()
        at = torch.full_like(largest, float(self._guard.next_step - self._guard.open))
        self._now = torch.stack([at, tokens.to(largest.dtype), largest])

    def judge(self, loss: Any) -> None:
        """What the loss was without these tokens. Only a finite one shows that they, and nothing else, are to blame."""
        now, self._now = self._now, None
        if now is None or not isinstance(loss, Tensor):
            return
        now = torch.where(loss.detach().isfinite().all(), now, torch.zeros_like(now))
        self._first = now if self._first is None else torch.where(self._first[1] > 0, self._first, now)

    @property
    def first(self) -> dict[str, Tensor]:
        """On the device, to be read with the log."""
        return {} if self._first is None else dict(zip(_NAMES, self._first.unbind(), strict=True))

    def say(self, read: dict[str, float]) -> bool:
        """Takes its numbers out of what was read. True if there was something, and an incident says so now."""
        step, tokens, largest = (read.pop(name, 0.0) for name in _NAMES)
        if not tokens:
            return False
        self._guard.engine.tell.incident(_incident(int(step), int(tokens), largest))
        return True


def _incident(step: int, tokens: int, largest: float) -> Incident:
    message = (
        f"{tokens} tokens that do not count (a tool's, an environment's, padding) are so far from the reference or old policy "
        f"that exp overflows, or are not finite: the largest log-ratio is {largest:.4g}. TRL masks them after exp, where Inf * 0 "
        "is NaN: its own loss, or its gradient, would have been NaN at this step. Here they are masked before exp: the loss is "
        "finite, and the weights never saw it. From now on they are only counted, as nanproof/rl/masked_overflow"
    )
    evidence = (
        f"exp of the log-ratios as they are is not finite at {tokens} masked tokens",
        "the loss of the same batch with these tokens equal in all policies is finite",
    )
    diagnosis = Diagnosis(
        cause="exp-overflow",
        confidence=1.0,
        phase="loss",
        where="GRPOTrainer._compute_loss",
        op="exp",
        evidence=evidence,
        fix=causes.fix_of("exp-overflow"),
        verified=True,
    )
    return Incident(step=step, kind="nonfinite-loss", action="recorded", message=message, diagnosis=diagnosis)
