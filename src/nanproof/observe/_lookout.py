"""Lookout: the guard's side of observing. Decides which steps get a full look, brings what was seen
to the record of its step, and lets the forecaster see it."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import nn

from nanproof._records import ABSENT, Forecast, Observed, StepRecord
from nanproof.core import _contracts as contracts
from nanproof.core._contracts import harmless
from nanproof.core._under_way import Attempt
from nanproof.core.judge._judge import Judge
from nanproof.core.judge._parameters import clean_name, has_compiled, unwrap
from nanproof.observe._activations import Observer
from nanproof.observe._attention import AttentionWatch, Sharpness
from nanproof.observe._forecast import Forecaster
from nanproof.observe._settings import Observe
from nanproof.observe._tables import COLUMNS, Rows, Seen
from nanproof.observe._weights import Moved, WeightWatch

log = logging.getLogger("nanproof")

EARLY = (10, 20, 30, 40)
"""Steps that get a full look besides: much of what goes wrong does so at the beginning."""
PATIENCE = 4
"""Steps between full looks that are asked for, at first."""


@dataclass(slots=True)
class _Parcel:
    """What a step sent on its way."""

    full: bool
    seen: Callable[[], Seen]
    attention: Callable[[], dict[str, Sharpness]]
    moved: Callable[[], Moved] | None = None


class Lookout(contracts.Lookout):
    """Looks on while steps are taken."""

    @staticmethod
    def of(judge: Judge, observe: Observe | bool | None) -> contracts.Lookout:
        """From what `observe=` was given."""
        settings = Observe.of(observe)
        return contracts.Lookout() if settings is None else Lookout(judge, settings)

    def __init__(self, judge: Judge, settings: Observe) -> None:
        model, device = judge.model, judge.parameters.device
        self._judge, self._settings = judge, settings
        self._observer = Observer(model, settings, device)
        compiled = has_compiled(model)
        self._attention = AttentionWatch(model, device) if settings.attention and not compiled else None
        self._weights = WeightWatch(model, judge.parameters, judge.optimizer) if settings.weights else None
        names = {clean_name(f"{n}.weight") for n, m in unwrap(model).named_modules() if isinstance(m, nn.Embedding)}
        self._forecaster = Forecaster(self._observer.sites, judge.optimizer, names) if settings.forecast else None
        self._parcels: dict[int, _Parcel] = {}
        self._sending: _Parcel | None = None
        self._asked, self._patience = -1, PATIENCE
        """The last step that got a full look because it was asked for, and how many steps there are
        to the next at least."""
        self._blind = 0
        """Steps in a row of which nothing was seen."""
        self._prepare(0)

    @harmless("the run is not observed")
    def open(self, attempt: Attempt) -> None:
        self._prepare(attempt.step)

    def _prepare(self, step: int) -> None:
        """The forwards of this step come next."""
        full = step % self._settings.every == 0 or step in EARLY or self._granted(step)
        self._observer.begin(full)
        if self._attention is not None:
            self._attention.begin(full)

    def _granted(self, step: int) -> bool:
        """Whether the forecaster gets the full look it asks for. If it goes on asking, it gets them
        ever more seldom."""
        if self._forecaster is None or not self._forecaster.asks:
            return False
        if self._forecaster.insists:
            return True
        if step - self._asked > 2 * self._settings.every:
            self._patience = PATIENCE
        if step != self._asked and step - self._asked < self._patience:
            return False
        if step != self._asked:
            self._patience = min(2 * self._patience, self._settings.every)
        self._asked = step
        return True

    @harmless("the run is not observed")
    def before(self, attempt: Attempt) -> None:
        attention = dict if self._attention is None else self._attention.send()
        self._sending = _Parcel(self._observer.full, self._observer.send(), attention)
        if self._weights is not None and self._observer.full:
            if self._weights.outdated(self._judge.parameters):
                self._weights = WeightWatch(self._judge.model, self._judge.parameters, self._judge.optimizer)
            self._weights.before()

    @harmless("the run is not observed")
    def after(self, attempt: Attempt) -> None:
        parcel, self._sending = self._sending, None
        if parcel is not None:
            parcel.moved = None if self._weights is None else self._weights.after()
            self._parcels[attempt.step] = parcel
        self._prepare(attempt.step + 1)

    def dropped(self) -> None:
        self._sending = None
        if self._weights is not None:
            self._weights.forget()

    def observed(self, record: StepRecord) -> StepRecord:
        return replace(record, observed=self._observed(record))

    @harmless("the run is not observed")
    def _observed(self, record: StepRecord) -> Observed | None:
        parcel = self._parcels.pop(record.step, None)
        if parcel is None:
            return None
        seen, sites = parcel.seen(), self._observer.sites
        count = len(sites)
        self._notice_blindness(seen)
        absmax = array("d", seen.absmax[:count])
        if not parcel.full:
            return Observed(sites=sites, absmax=absmax)
        moved = parcel.moved() if parcel.moved is not None else None
        gradients = array("d", seen.absmax[count:])
        any_gradient = gradients.count(ABSENT) < count
        return Observed(
            sites=sites,
            absmax=absmax,
            outputs=_columns(seen.rows, 0, count),
            gradients={"absmax": gradients, **_columns(seen.rows, count, count)} if any_gradient else {},
            updates={} if moved is None else self._updates(moved, record),
            attention=parcel.attention(),
            unmoved={} if moved is None else moved.unmoved,
        )

    def foresee(self, record: StepRecord) -> list[Forecast]:
        return self._foresee(record) or []

    @harmless("the run is not observed")
    def _foresee(self, record: StepRecord) -> list[Forecast]:
        if self._forecaster is None:
            return []
        return self._forecaster.see(record, self._observer.dtypes[: len(self._observer.sites)])

    def rewound(self) -> None:
        self._parcels.clear()
        if self._forecaster is not None:
            self._forecaster.rewound()

    def stop(self) -> None:
        self.close()

    def close(self, alone: bool = False) -> None:
        self.off = True
        self._observer.close()
        if self._attention is not None:
            self._attention.close()

    def _updates(self, moved: Moved, record: StepRecord) -> dict[str, array[float]]:
        rates = self._judge.parameters.by_parameter(record.lr)
        ratio, over = array("d"), array("d")
        for update, weight, lr in zip(moved.update, moved.weight, rates, strict=True):
            there = update != ABSENT
            ratio.append(update / weight if there and weight > 0 else ABSENT)
            over.append(update / lr if there and lr > 0 else ABSENT)
        return {"ratio": ratio, "changed": moved.changed, "over_lr": over}

    def _notice_blindness(self, seen: Seen) -> None:
        """Hooks that torch ignores say nothing: then this must."""
        nothing = seen.absmax.count(ABSENT) == len(seen.absmax)
        self._blind = 0 if not nothing or not self._observer.sites or not self._observer.on else self._blind + 1
        if self._blind == 2:
            log.warning(
                "nanproof: none of the %d observed modules was seen in two steps. Code compiled before the guard was made does "
                "not run hooks: make the guard first, or call torch._dynamo.reset(). Inside of torch.func's "
                "vmap and grad nothing is seen",
                len(self._observer.sites),
            )


def _columns(rows: Rows, first: int, count: int) -> dict[str, array[float]]:
    """The other columns of a full look, as they are recorded."""
    more = {name: array("d", (ABSENT,)) * count for name in ("rms", "nan", "inf", "zeros", "near")}
    for i in range(count):
        seen = rows.get(first + i)
        if seen is not None and len(seen) == len(COLUMNS):
            _, number, squares, nan, inf, zeros, near = seen
            for name, value in zip(more, ((squares / number) ** 0.5, nan, inf, zeros / number, near / number), strict=True):
                more[name][i] = value
    return more
