"""Observe: what is looked at, and how often. Frozen, keyword-only, checked when it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from nanproof._errors import UsageError

AUTO = "auto"


@dataclass(frozen=True, kw_only=True, slots=True)
class Observe:
    """What a guard looks at besides loss and gradients. The defaults cost about nothing; `Observe(modules="*", every=1)` is all
    of it at every step."""

    modules: str | Sequence[str] | Callable[[str, Any], bool] = AUTO
    """Whose outputs: names with wildcards ("model.layers.*.mlp", or several), or a function of name and module. "auto" takes the
    residual stream and the outputs of attention and MLP; in a model without repeated blocks, every layer with a weight matrix."""

    every: int = 50
    """Steps from one full look to the next; the others see the largest absolute value of each output only. A full look adds
    RMS, NaN, Inf, zeros, values close to the dtype's maximum, gradients, weights and attention. Steps 10 to 40 have four more,
    and so do steps at which something looks odd. 1: every step."""

    gradients: bool = True
    """On full looks, the gradient of each output too."""

    weights: bool = True
    """On full looks, a sample of each parameter before and after the step: how far it moved, and which share of it at all."""

    attention: bool = True
    """On full looks, a sample of attention logits and their entropy. Not inside compiled code."""

    forecast: bool = True
    """Warn of what is on its way: see `guard.forecasts`."""

    def __post_init__(self) -> None:
        if isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1:
            raise UsageError(f"Observe(every={self.every!r}): a whole number of at least 1 is needed")
        for name in ("gradients", "weights", "attention", "forecast"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"Observe({name}={getattr(self, name)!r}): True or False is needed")
        wanted = self.modules
        if callable(wanted) or (isinstance(wanted, str) and wanted):
            return
        if (
            isinstance(wanted, str)
            or not isinstance(wanted, Sequence)
            or not wanted
            or not all(isinstance(w, str) for w in wanted)
        ):
            raise UsageError(
                f'Observe(modules={wanted!r}): "auto", a name with wildcards, several of them, or a function is needed'
            )

    @classmethod
    def of(cls, given: Any) -> Observe | None:
        """From what `observe=` was given: True, False, None, or settings."""
        if given is None or given is False:
            return None
        if given is True:
            return cls()
        if not isinstance(given, cls):
            raise UsageError(f"observe={given!r}: True, False or nanproof.Observe(...) is needed")
        return given
