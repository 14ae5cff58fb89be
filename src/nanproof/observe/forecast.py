"""Forecaster: what is on its way, from the records of the steps so far.

It says nothing of a growth that it has not seen for as long as it looks ahead: a line through 64 steps is continued for 64
steps at the most. Each thing is said once, and again only after it was gone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from nanproof.observe.early import DepthWatch, EntropyWatch, MomentWatch, ScaleWatch
from nanproof.observe.trend import Fit, Series
from nanproof.records import ABSENT, Forecast, StepRecord

STRIDE = 4
"""Steps from one look at the lines to the next."""
AHEAD = 1.0
"""How far a line is continued, in windows."""
FITS = 0.8
RISE = 1.5
"""Doublings over the window, at least."""
KEEPS_ON = 0.6
"""Slope of the second half over that of the whole window, at least: a growth that slows down does not arrive."""
DIVERGES = 3.0
"""Doublings of a gradient norm or an output over the window, while the loss grows too."""
LOSS_FITS, LOSS_RISE = 0.5, 0.15
PERSISTS = 2
"""Looks in a row."""
_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64"}


class Forecaster:
    """Sees every accepted step, and says what is coming."""

    def __init__(self, sites: Sequence[str], optimizer: torch.optim.Optimizer, embeddings: set[str]) -> None:
        self._sites = tuple(sites)
        self._series = Series(len(self._sites) + 2)
        self._row = torch.empty(len(self._sites) + 2, dtype=torch.float64)
        self._steps = 0
        self._often: dict[str, int] = {}
        """By kind: looks in a row that found it."""
        self._early = (MomentWatch(optimizer, embeddings), ScaleWatch(), DepthWatch(self._sites), EntropyWatch())

    @property
    def asks(self) -> bool:
        """Something looks odd: the next step is worth a full look."""
        return any(watch.asks for watch in self._early)

    def rewound(self) -> None:
        """The run is elsewhere: lines through the way it came say nothing."""
        self._series.clear()
        self._often.clear()

    def see(self, record: StepRecord, dtypes: Sequence[torch.dtype | None]) -> list[Forecast]:
        found = [said for watch in self._early if (said := watch.see(record)) is not None]
        observed = record.observed
        if observed is None:
            return found
        row = self._row
        row[: len(self._sites)] = torch.frombuffer(observed.absmax, dtype=torch.float64)
        row[-2], row[-1] = record.loss, record.grad_norm
        row[: len(self._sites)].masked_fill_(row[: len(self._sites)] == ABSENT, torch.nan)
        logs = row.log2()
        logs[-2] = record.loss  # of either sign
        self._series.add(logs.masked_fill_(~logs.isfinite(), torch.nan))
        self._steps += 1
        if self._steps % STRIDE == 0:
            fits = self._series.fits()
            found += [f for f in (self._overflow(record, fits, dtypes), self._divergence(record, fits)) if f is not None]
        return found

    def _lasting(self, kind: str, found: bool) -> bool:
        """Found for the second time in a row, and not before."""
        self._often[kind] = self._often.get(kind, 0) + 1 if found else 0
        return self._often[kind] == PERSISTS

    def _overflow(self, record: StepRecord, fits: list[Fit], dtypes: Sequence[torch.dtype | None]) -> Forecast | None:
        """A line that reaches the largest number of the output's dtype."""
        n = len(self._sites)
        ceiling = torch.tensor([math.inf if d is None else math.log2(torch.finfo(d).max) for d in dtypes], dtype=torch.float64)
        best = torch.full((n,), torch.inf, dtype=torch.float64)
        margin = torch.zeros(n, dtype=torch.float64)
        for line in fits:
            slope = line.slope[:n]
            left = (ceiling - line.end[:n]) / slope
            sure = (slope > 0) & (line.rise[:n] >= RISE) & (line.fits[:n] >= FITS) & (line.late[:n] >= KEEPS_ON * slope)
            sure &= (left >= 0) & (left <= AHEAD * line.window)
            spread = left * 2 * line.error[:n] / slope + 2 * line.noise[:n] / slope
            better = sure & (left < best)
            best, margin = torch.where(better, left, best), torch.where(better, spread, margin)
        places = best.isfinite().nonzero().flatten().tolist()
        if not self._lasting("activation-overflow", bool(places)):
            return None
        places.sort(key=lambda i: float(best[i]))
        first, dtype = places[0], dtypes[places[0]]
        assert dtype is not None and record.observed is not None
        steps, more = float(best[first]), float(margin[first])
        others = f", and {len(places) - 1} more sites" if len(places) > 1 else ""
        message = (
            f"{self._sites[first]} reaches {_NAMES.get(dtype, str(dtype))}'s maximum in about {steps:.0f} ± {max(more, 1):.0f} "
            f"steps at this rate (now {record.observed.absmax[first]:.4g} of {torch.finfo(dtype).max:.4g}){others}"
        )
        return Forecast(
            step=record.step, kind="activation-overflow", message=message, where=self._sites[first],
            steps=steps, margin=more, also=tuple(self._sites[i] for i in places[1:]),
        )  # fmt: skip

    def _divergence(self, record: StepRecord, fits: list[Fit]) -> Forecast | None:
        """Outputs or the gradient norm grow steadily, and the loss with them."""
        found: tuple[Fit, int] | None = None
        for line in fits:
            size = max(abs(float(line.end[-2]) - float(line.rise[-2])), 1e-12)
            if not (line.slope[-2] > 0 and line.fits[-2] >= LOSS_FITS and line.rise[-2] >= LOSS_RISE * size):
                continue
            steady = (line.rise >= DIVERGES) & (line.fits >= FITS) & (line.late >= KEEPS_ON * line.slope)
            steady[-2] = False
            if bool(steady.any()):
                found = line, int(torch.where(steady, line.rise, -torch.inf).argmax())
        if not self._lasting("divergence", found is not None) or found is None:
            return None
        line, place = found
        where = self._sites[place] if place < len(self._sites) else None
        factor = 2.0 ** float(line.rise[place])
        what = f"the output of {where}" if where is not None else "the gradient norm"
        message = (
            f"{what} has grown {factor:.3g} times in {line.window} steps, and the loss grows with it (now {record.loss:.4g})"
        )
        return Forecast(step=record.step, kind="divergence", message=message, where=where)
