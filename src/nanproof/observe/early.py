"""Early signs that no line through an output shows: second moments gone stale, a signal that multiplies from layer to layer, a
loss scale on its way down, attention that sees one key only."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Sequence

import torch

from nanproof.records import ABSENT, Forecast, StepRecord

STALE = 2.0
"""RMS of Adam's update over the learning rate; healthy is 1 at the most."""
SUSPECT = 1.4
"""The same, estimated from the gradient norms: worth a look at the weights."""
A_LAYER, DEPTH, GEOMETRIC = 1.0, 8.0, 0.9
"""Doublings a layer and over all of them, and how well that fits."""
HALVINGS, SETTLED = 4, 30
"""Of the loss scale, net, after the steps in which it finds its level."""
SHARP, LOGIT = 0.05, 50.0
"""Entropy of attention over the largest possible one, and the largest logit."""


class Watch:
    """Sees every accepted step; says each thing once until it is gone."""

    asks = False

    def __init__(self) -> None:
        self._said = False

    def see(self, record: StepRecord) -> Forecast | None:
        found = self.look(record)
        if found is None:
            return None
        kind, where, message = found
        if self._said:
            return None
        self._said = True
        return Forecast(step=record.step, kind=kind, where=where, message=message)

    def look(self, record: StepRecord) -> tuple[str, str | None, str] | None:
        """(kind, where, message)"""
        raise NotImplementedError


class MomentWatch(Watch):
    """Adam divides by a running mean of squared gradients. Where gradients have grown faster than that, steps are too long."""

    def __init__(self, optimizer: torch.optim.Optimizer, embeddings: set[str]) -> None:
        super().__init__()
        group = optimizer.param_groups[0]
        betas = group.get("betas")
        self._betas: tuple[float, float] | None = None
        if isinstance(betas, (tuple, list)) and len(betas) == 2 and "eps" in group:
            self._betas = float(betas[0]), float(betas[1])
        self._embeddings = embeddings
        """Rows that are seldom used have large updates in good health."""
        self._first: torch.Tensor | None = None
        self._second: torch.Tensor | None = None
        self._steps = 0

    def look(self, record: StepRecord) -> tuple[str, str | None, str] | None:
        if self._betas is None:
            return None
        norms = torch.frombuffer(record.norms, dtype=torch.float64).clamp(min=0) / record.clip
        if self._first is None or self._second is None or self._first.shape != norms.shape:
            self._first, self._second, self._steps = torch.zeros_like(norms), torch.zeros_like(norms), 0
        b1, b2 = self._betas
        self._steps += 1
        self._first.lerp_(norms, 1 - b1)
        self._second.lerp_(norms.square(), 1 - b2)
        size = (self._first / (1 - b1**self._steps)) / (self._second / (1 - b2**self._steps)).clamp(min=1e-60).sqrt()
        self.asks = bool((size > SUSPECT).any())
        updates = record.observed.updates.get("over_lr") if record.observed is not None else None
        if updates is None:
            return None
        worst, where = max(
            ((u, name) for u, name in zip(updates, record.names, strict=True) if name not in self._embeddings), default=(0.0, "")
        )
        if worst < STALE or not math.isfinite(worst):
            self._said = self._said and worst > STALE / 2
            return None
        message = (
            f"{where} moves by {worst:.2g} times the learning rate in a step (healthy: 1 at the most): its gradients have grown "
            f"faster than Adam's second moment follows (beta2 {b2:g})"
        )
        return "stale-second-moment", where, message


class ScaleWatch(Watch):
    """A loss scale that finds its level is healthy; one that has found it and goes on falling ends below 1."""

    def __init__(self) -> None:
        super().__init__()
        self._scales: deque[float] = deque(maxlen=500)
        self._steps = 0

    def look(self, record: StepRecord) -> tuple[str, str | None, str] | None:
        if record.scale is None or not record.scale > 0:
            return None
        self._steps += 1
        if self._steps > SETTLED:
            self._scales.append(record.scale)
        if not self._scales:
            return None
        fallen = math.log2(max(self._scales) / record.scale)
        if fallen < HALVINGS:
            self._said = False
            return None
        message = (
            f"the loss scale was halved {fallen:.0f} times in the last {len(self._scales)} steps, and is {record.scale:g}: "
            "gradients are growing; below 1 no scale helps"
        )
        return "loss-scale-collapse", None, message


class DepthWatch(Watch):
    """A signal that is multiplied by about the same from layer to layer, forwards or backwards."""

    def __init__(self, sites: Sequence[str]) -> None:
        super().__init__()
        families: dict[str, list[int]] = {}
        for i, site in enumerate(sites):
            numbered = re.fullmatch(r"(.*?)(\d+)(\..*)?", site)
            if numbered is not None:
                families.setdefault(f"{numbered[1]}#{numbered[3] or ''}", []).append(i)
        self._families = {name: places for name, places in families.items() if len(places) >= 4}
        self._sites = tuple(sites)

    def look(self, record: StepRecord) -> tuple[str, str | None, str] | None:
        observed = record.observed
        if observed is None or "rms" not in observed.outputs:
            return None
        for direction, columns in (("outputs", observed.outputs), ("gradients", observed.gradients)):
            for name, places in self._families.items():
                values = [columns["rms"][i] for i in places] if "rms" in columns else []
                if not values or any(v == ABSENT or not 0 < v < math.inf for v in values):
                    continue
                logs = [math.log2(v) for v in (values if direction == "outputs" else values[::-1])]
                slope, fits = _line(logs)
                if slope >= A_LAYER and slope * (len(logs) - 1) >= DEPTH and fits >= GEOMETRIC:
                    far = self._sites[places[-1] if direction == "outputs" else places[0]]
                    message = (
                        f"the {direction} of {name.replace('#', '*')} grow {2**slope:.2g} times from layer to layer"
                        f"{'' if direction == 'outputs' else ', towards the input'}: {2 ** (slope * (len(logs) - 1)):.2g} times "
                        f"over {len(logs)}"
                    )
                    return "exploding-depth", far, message
        self._said = False
        return None


class EntropyWatch(Watch):
    """Attention of a whole layer that looks at one key only, with logits that have grown: its gradients vanish, then jump."""

    def __init__(self) -> None:
        super().__init__()
        self._first: dict[str, tuple[float, float, float]] = {}

    def look(self, record: StepRecord) -> tuple[str, str | None, str] | None:
        observed = record.observed
        if observed is None or not observed.attention:
            return None
        for name, (logit, entropy, _) in observed.attention.items():
            first = self._first.setdefault(name, (logit, entropy, 0.0))
            if entropy < SHARP < first[1] and logit > LOGIT and logit > 4 * first[0]:
                message = (
                    f"attention in {name} sees about one key: entropy {entropy:.2g} of its maximum (at first {first[1]:.2g}), "
                    f"largest logit {logit:.4g} (at first {first[0]:.3g})"
                )
                return "entropy-collapse", name, message
        self._said = False
        return None


def _line(values: Sequence[float]) -> tuple[float, float]:
    """Slope, and the share of the variation that a line explains."""
    n = len(values)
    mean = sum(values) / n
    x = [i - (n - 1) / 2 for i in range(n)]
    width = sum(i * i for i in x)
    slope = sum(i * v for i, v in zip(x, values, strict=True)) / width
    total = sum((v - mean) ** 2 for v in values)
    return slope, slope * slope * width / total if total > 0 else 0.0
