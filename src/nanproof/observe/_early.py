"""Early signs that no line through an output shows: second moments gone stale, a signal that multiplies from layer to layer, a
loss scale on its way down, attention that sees one key only."""

from __future__ import annotations

import math
import re
import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from typing import Any

from nanproof._records import ABSENT, Forecast, Observed, StepRecord
from nanproof.core.support._members import optimizers_in

STALE = 2.0
"""RMS of Adam's update over the learning rate; healthy is 1 at the most."""
YOUNG = 5
"""Steps after which a second moment can be stale. Adam's steps cannot be too long before; RAdam does without it until then."""
SUSPECT = 1.4
"""The same, estimated from the gradient norms: worth a look at the weights."""
A_LAYER, DEPTH, WORSE, GEOMETRIC = 1.0, 16.0, 4.0, 0.9
"""Doublings a layer, over all of them, and more of them than at first; and how well a line fits."""
HALVINGS, LOW, SETTLED = 4, 128.0, 30
"""Of the loss scale: net halvings, and below what, after the steps in which it finds its level."""
LARGE, TIMES, AFTER = 0.1, 4.0, 20
"""Update over weight, and over what is usual, after the first steps."""
SHARP, LOGIT = 0.05, 50.0
"""Entropy of attention over the largest possible one, and the largest logit."""


class Watch(ABC):
    """Sees every accepted step; says a thing once, and again only after it was gone for a while."""

    asks = False
    insists = False
    """It asks so seldom that it is to be given what it asks for."""
    AWAY = 50
    """Looks in a row without it."""

    def __init__(self) -> None:
        self._clean = self.AWAY

    def see(self, record: StepRecord) -> Forecast | None:
        if not self.looks_at(record):
            return None
        found = self.look(record)
        if found is None:
            self._clean += 1
            return None
        away, self._clean = self._clean >= self.AWAY, 0
        kind, where, message = found
        return Forecast(step=record.step, kind=kind, where=where, message=message) if away else None

    def looks_at(self, record: StepRecord) -> bool:
        """Whether the record has something to look at."""
        return True

    @abstractmethod
    def look(self, record: StepRecord) -> tuple[str, str | None, str] | None:
        """(kind, where, message)"""


class MomentWatch(Watch):
    """Adam divides by a running mean of squared gradients. Where gradients have grown faster than that, steps are too long.

    Beside another optimizer, only what Adam trains is watched.
    """

    def __init__(self, optimizer: Any, embeddings: set[str]) -> None:
        super().__init__()
        groups = [group for each in optimizers_in(optimizer) for group in each.param_groups if _is_adam(group)]
        self._betas: tuple[float, float] | None = None
        if groups:
            self._betas = float(groups[0]["betas"][0]), float(groups[0]["betas"][1])
        held = {id(p) for group in groups for p in group["params"]}
        each = {id(p): p for group in optimizer.param_groups for p in group["params"]}
        self.places = [key in held for key in each]
        """By parameter, in the order of records: whether Adam trains it."""
        self._embeddings = embeddings
        """Rows that are seldom used have large updates in good health."""
        self._first, self._second, self._steps = 0.0, 0.0, 0
        """Adam's moments of the norm of all gradients."""

    def looks_at(self, record: StepRecord) -> bool:
        if self._betas is None:
            return False
        b1, b2 = self._betas
        norm = self._norm(record) / record.clip
        self._steps += 1
        self._first += (1 - b1) * (norm - self._first)
        self._second += (1 - b2) * (norm * norm - self._second)
        second = self._second / (1 - b2**self._steps)
        self.asks = second > 0 and self._first / (1 - b1**self._steps) > SUSPECT * second**0.5
        return self._steps > YOUNG and record.observed is not None and bool(record.observed.updates)

    @property
    def watches(self) -> bool:
        """Whether there is an Adam to watch."""
        return self._betas is not None

    def _mine(self, record: StepRecord) -> list[bool]:
        """The places in this record that Adam trains; all of them where parameters were added since."""
        return self.places if len(self.places) == len(record.names) else [True] * len(record.names)

    def _norm(self, record: StepRecord) -> float:
        """The norm of the gradients that Adam gets."""
        mine = self._mine(record)
        if all(mine):
            return record.grad_norm
        return math.sqrt(sum(n * n for n, ok in zip(record.norms, mine, strict=True) if ok and n != ABSENT))

    def look(self, record: StepRecord) -> tuple[str, str | None, str] | None:
        assert record.observed is not None and self._betas is not None
        updates = zip(record.observed.updates["over_lr"], record.names, self._mine(record), strict=True)
        moved = [(u, name) for u, name, mine in updates if mine and name not in self._embeddings and u < math.inf]
        stale = [(u, name) for u, name in moved if u >= STALE]
        if len(stale) < max(2, len(moved) / 20):
            return None
        worst, where = max(stale)
        message = (
            f"{where} moves by {worst:.2g} times the learning rate in a step (healthy: 1 at the most), {len(stale)} parameters "
            f"by more than {STALE:g}: gradients have grown faster than Adam's second moment follows (beta2 {self._betas[1]:g})"
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
        if fallen < HALVINGS or record.scale > LOW:
            return None
        message = (
            f"the loss scale was halved {fallen:.0f} times in the last {len(self._scales)} steps, and is {record.scale:g}: "
            "gradients are growing; below 1 no scale helps"
        )
        return "loss-scale-collapse", None, message


class SizeWatch(Watch):
    """Steps that change the weights by a good part of their size, and did not before: the learning rate, or the gradients, have
    outgrown what the run can bear."""

    insists = True  # whenever the learning rate has grown by half

    def __init__(self) -> None:
        super().__init__()
        self._past: deque[float] = deque(maxlen=20)
        self._rate = 0.0
        """The learning rate at the last full look."""

    def looks_at(self, record: StepRecord) -> bool:
        rate = max(record.lr, default=0.0)
        self.asks = rate > 1.5 * self._rate and record.step > AFTER
        if record.observed is None or not record.observed.updates or record.step <= AFTER:
            return False
        self._rate, self.asks = rate, False
        return True

    def look(self, record: StepRecord) -> tuple[str, str | None, str] | None:
        assert record.observed is not None
        ratio = middle_ratio(record.observed)
        if ratio is None:
            return None
        usual = statistics.median(self._past) if len(self._past) >= 3 else math.inf
        self._past.append(ratio)
        if ratio < max(LARGE, TIMES * usual):
            return None
        message = (
            f"a step changes the weights by {ratio:.2g} of their size, {ratio / usual:.3g} times what is usual "
            f"(learning rate {max(record.lr):.3g})"
        )
        return "divergence", None, message


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
        self._first: dict[tuple[str, str], float] = {}
        """Doublings over all layers at the first look: some models are made like that, and live."""

    def looks_at(self, record: StepRecord) -> bool:
        return record.observed is not None and "rms" in record.observed.outputs

    def look(self, record: StepRecord) -> tuple[str, str | None, str] | None:
        observed = record.observed
        assert observed is not None
        for direction, columns in (("outputs", observed.outputs), ("gradients", observed.gradients)):
            for name, places in self._families.items():
                values = [columns["rms"][i] for i in places] if "rms" in columns else []
                if not values or any(v == ABSENT or not 0 < v < math.inf for v in values):
                    continue
                logs = [math.log2(v) for v in (values if direction == "outputs" else values[::-1])]
                slope, fits = _line(logs)
                total = slope * (len(logs) - 1)
                first = self._first.setdefault((direction, name), total)
                if slope >= A_LAYER and total >= max(DEPTH, first + WORSE) and fits >= GEOMETRIC:
                    far = self._sites[places[-1] if direction == "outputs" else places[0]]
                    message = (
                        f"the {direction} of {name.replace('#', '*')} grow {2**slope:.2g} times from layer to layer"
                        f"{'' if direction == 'outputs' else ', towards the input'}: {2**total:.2g} times "
                        f"over {len(logs)}"
                    )
                    return "exploding-depth", far, message
        return None


class EntropyWatch(Watch):
    """Attention of a whole layer that looks at one key only, with logits that have grown: its gradients vanish, then jump."""

    def __init__(self) -> None:
        super().__init__()
        self._first: dict[str, tuple[float, float, float]] = {}

    def looks_at(self, record: StepRecord) -> bool:
        return record.observed is not None and bool(record.observed.attention)

    def look(self, record: StepRecord) -> tuple[str, str | None, str] | None:
        observed = record.observed
        assert observed is not None
        for name, (logit, entropy, _) in observed.attention.items():
            first = self._first.setdefault(name, (logit, entropy, 0.0))
            if entropy < SHARP < first[1] and logit > LOGIT and logit > 4 * first[0]:
                message = (
                    f"attention in {name} sees about one key: entropy {entropy:.2g} of its maximum (at first {first[1]:.2g}), "
                    f"largest logit {logit:.4g} (at first {first[0]:.3g})"
                )
                return "entropy-collapse", name, message
        return None


def _is_adam(group: dict[str, Any]) -> bool:
    betas = group.get("betas")
    return isinstance(betas, (tuple, list)) and len(betas) == 2 and "eps" in group


def middle_ratio(observed: Observed) -> float | None:
    """Update over weight of the middle parameter; None if none was looked at."""
    ratios = sorted(r for r in observed.updates.get("ratio", ()) if 0 < r < math.inf)
    return ratios[(len(ratios) - 1) // 2] if ratios else None


def _line(values: Sequence[float]) -> tuple[float, float]:
    """Slope, and the share of the variation that a line explains."""
    n = len(values)
    mean = sum(values) / n
    x = [i - (n - 1) / 2 for i in range(n)]
    width = sum(i * i for i in x)
    slope = sum(i * v for i, v in zip(x, values, strict=True)) / width
    total = sum((v - mean) ** 2 for v in values)
    return slope, slope * slope * width / total if total > 0 else 0.0
