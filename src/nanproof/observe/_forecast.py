"""Forecaster: what is on its way, from the records of the steps so far.

It says nothing of a growth that it has not seen for as long as it looks ahead: a line through 64 steps is continued for 45
at the most. Each thing is said once, and again only after it was gone. The limits below were set on the runs of
`zoo/forecast/runs.py` that are for that, and judged on the others.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from nanproof._records import Forecast, Observed, StepRecord
from nanproof.observe._early import DepthWatch, EntropyWatch, MomentWatch, ScaleWatch, SizeWatch, middle_ratio
from nanproof.observe._trend import Fit, Series, lines

STRIDE = 4
"""Steps from one look at the lines to the next."""
AHEAD = 0.7
"""How far a line is continued, in windows."""
FITS = 0.9
"""Share of the variation that a line explains, at least."""
RISE = 1.0
"""Doublings over the window, at least."""
KEEPS_ON = 0.9
"""Slope of the second half over that of the whole window, at least: a growth that slows down does not arrive."""
MARGIN = 0.4
"""Of the steps that are left, at least: few growths keep their rate."""
PERSISTS = 2
"""Looks in a row."""
AWAY, NEARER = 50, 4
"""A thing is said again after so many steps without it, or when it is so many times nearer than it was said to be."""
LOSS_RISE, LOSS_FITS = 1.0, 0.6
"""Doublings of the loss over the window, and how well they fit: what diverges."""
WITH_IT = 1.0
"""Doublings of the gradient norm or an output at the same time."""
LARGE = 0.4
"""Share of the largest exponent below which an output is not looked at more closely."""
LOSS_AT_LEAST = 1.4
"""The same for the loss, over the least of late."""
MOVED = 1.5
"""How often the weights were exchanged over the window, at least: growth that comes with the data leaves them where they are."""
_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


class Forecaster:
    """Sees every accepted step, and says what is coming."""

    def __init__(self, sites: Sequence[str], optimizer: torch.optim.Optimizer, embeddings: set[str]) -> None:
        self._sites = tuple(sites)
        self._series = Series()
        """Outputs, then loss and gradient norm."""
        self._losses: deque[float] = deque(maxlen=64)
        """Every so many steps one."""
        self._steps = 0
        self._often: dict[str, int] = {}
        """By kind: looks in a row that found it."""
        self._said: dict[str, tuple[float, float]] = {}
        """By kind: the last step it was true, and in how many steps it was said to come."""
        self._ratio: float | None = None
        """Update over weight, of the middle parameter, at the last full look."""
        self._limits_of: Sequence[torch.dtype | None] = ()
        self._limits: list[float] = []
        """By site: what is large for outputs of these dtypes."""
        self._suspects = False
        self._early = (MomentWatch(optimizer, embeddings), ScaleWatch(), SizeWatch(), DepthWatch(self._sites), EntropyWatch())

    @property
    def asks(self) -> bool:
        """Something looks odd: the next step is worth a full look."""
        return self._suspects or any(watch.asks for watch in self._early)

    @property
    def insists(self) -> bool:
        """It asks for one of few looks."""
        return any(watch.insists and watch.asks for watch in self._early)

    def rewound(self) -> None:
        """The run is elsewhere: lines through the way it came say nothing."""
        self._series.clear()
        self._often.clear()
        self._said.clear()
        self._losses.clear()
        self._suspects = False

    def see(self, record: StepRecord, dtypes: Sequence[torch.dtype | None]) -> list[Forecast]:
        found = [said for watch in self._early if (said := watch.see(record)) is not None]
        observed = record.observed
        if observed is None:
            return found
        self._note(record, observed)
        self._steps += 1
        if self._steps % STRIDE:
            return found
        # Lines cost the host a millisecond; nearly always it can be seen without them that there is nothing.
        large, grows = self._large(observed, dtypes), self._grows(record)
        logs: list[Fit] = []
        plain: list[Fit] = []
        if large or grows:
            values = self._series.values()
            values.masked_fill_(~(values > 0) | ~values.isfinite(), torch.nan)
            logs, plain = lines(values.log2()), lines(values) if large else []
        overflow = self._overflow(record, observed, logs if large else [], plain, dtypes)
        ahead = (overflow, self._divergence(record, logs if grows else []))
        return found + [f for f in ahead if f is not None]

    def _large(self, observed: Observed, dtypes: Sequence[torch.dtype | None]) -> bool:
        """An output is within the upper half of what its dtype can hold, on a logarithmic scale."""
        if dtypes != self._limits_of:
            self._limits_of = dtypes
            self._limits = [math.inf if d is None else torch.finfo(d).max ** LARGE for d in dtypes]
        return any(map(operator.gt, observed.absmax, self._limits))

    def _grows(self, record: StepRecord) -> bool:
        """The loss is well above the least of late."""
        self._losses.append(record.loss)
        return record.loss > LOSS_AT_LEAST * min(self._losses) and record.loss > 0

    def _note(self, record: StepRecord, observed: Observed) -> None:
        self._series.add([*observed.absmax, record.loss, record.grad_norm])
        ratio = middle_ratio(observed)
        self._ratio = ratio if ratio is not None else self._ratio

    def _lasting(self, kind: str, found: bool, steps: float = math.inf) -> bool:
        """Found for the second time in a row; and not said of late, unless it has come much nearer."""
        self._often[kind] = self._often.get(kind, 0) + 1 if found else 0
        if self._often[kind] < PERSISTS:
            return False
        at, ahead = self._said.get(kind, (-math.inf, math.inf))
        if self._steps - at < AWAY and not steps < ahead / NEARER:
            self._said[kind] = self._steps, ahead
            return False
        self._said[kind] = self._steps, steps
        return True

    def _overflow(
        self, record: StepRecord, observed: Observed, logs: list[Fit], plain: list[Fit], dtypes: Sequence[torch.dtype | None]
    ) -> Forecast | None:
        """A line that reaches the largest number of the output's dtype: through the values, or through their logarithms."""
        if not logs:
            self._lasting("activation-overflow", False)
            return None
        n = len(self._sites)
        most = torch.tensor([math.inf if d is None else torch.finfo(d).max for d in dtypes], dtype=torch.float64)
        best, margin = torch.full((n,), torch.inf, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
        for log, line in zip(logs, plain, strict=True):
            doubled = log.rise[:n] >= RISE
            for fit, ceiling in ((log.first(n), most.log2()), (line.first(n), most)):
                left, spread, sure = _arrival(fit, ceiling)
                better = sure & doubled & (left < best)
                best, margin = torch.where(better, left, best), torch.where(better, spread, margin)
        places = best.isfinite().nonzero().flatten().tolist()
        places.sort(key=lambda i: float(best[i]))
        if not self._lasting("activation-overflow", bool(places), float(best[places[0]]) if places else math.inf):
            return None
        first, dtype = places[0], dtypes[places[0]]
        assert dtype is not None
        steps, more = float(best[first]), float(margin[first])
        others = f"; {len(places) - 1} more on the way" if len(places) > 1 else ""
        message = (
            f"{self._sites[first]} reaches {_NAMES.get(dtype, str(dtype))}'s maximum in about {steps:.0f} ± {max(more, 1):.0f} "
            f"steps at this rate (now {observed.absmax[first]:.4g} of {torch.finfo(dtype).max:.4g}){others}"
        )
        return Forecast(
            step=record.step, kind="activation-overflow", message=message, where=self._sites[first],
            steps=steps, margin=more, also=tuple(self._sites[i] for i in places[1:]),
        )  # fmt: skip

    def _divergence(self, record: StepRecord, logs: list[Fit]) -> Forecast | None:
        """The loss grows steadily, outputs or gradients with it, and it is the weights that move."""
        found: tuple[Fit, int] | None = None
        suspects = False
        for line in logs:
            loss_grows = line.rise[-2] >= LOSS_RISE and line.fits[-2] >= LOSS_FITS and line.late[-2] >= KEEPS_ON * line.slope[-2]
            if not loss_grows:
                continue
            steady = (line.rise >= WITH_IT) & (line.fits >= LOSS_FITS) & (line.late >= KEEPS_ON * line.slope)
            steady[-2] = False
            if bool(steady.any()):
                suspects = True
                if self._ratio is not None and self._ratio * line.window >= MOVED:
                    found = line, int(torch.where(steady, line.rise, -torch.inf).argmax())
        self._suspects = suspects
        if not self._lasting("divergence", found is not None) or found is None:
            return None
        line, place = found
        where = self._sites[place] if place < len(self._sites) else None
        what = f"the output of {where}" if where is not None else "the gradient norm"
        message = (
            f"the loss has grown {2.0 ** float(line.rise[-2]):.3g} times in {line.window} steps, {what} "
            f"{2.0 ** float(line.rise[place]):.3g} times (loss now {record.loss:.4g})"
        )
        return Forecast(step=record.step, kind="divergence", message=message, where=where)


def _arrival(fit: Fit, ceiling: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Steps until each line is at its ceiling, more or less, and whether that can be said."""
    left = (ceiling - fit.end) / fit.slope
    spread = torch.maximum((2 * left * fit.error + 2 * fit.noise) / fit.slope, MARGIN * left)
    sure = (fit.slope > 0) & (fit.fits >= FITS) & (fit.late >= KEEPS_ON * fit.slope)
    return left, spread, sure & (left >= 0) & (left <= AHEAD * fit.window)
