"""The shape of finite curves: a loss that diverges or spikes, an evaluation that turns, a gradient that explodes.

All thresholds are relative to what the run itself has learned and to its own noise, so that a loss in other units is judged
alike. Losses of reinforcement learning hover about 0 and have no direction: of those, only explosions are reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from statistics import median

from nanproof.logs._curve import Bucket, number
from nanproof.logs._story import Segment
from nanproof.logs.judge._finding import CHECK, OBSERVE, RUN, SLOWER, Finding, Likely
from nanproof.logs.judge._levels import absurd, outlier, saturated
from nanproof.logs.judge._numbers import fills, is_sum, level, noise, smooth

BEST_NEAR = 4
"""How far from the best of the smoothed curve the best line may stand."""
ENOUGH = 8
"""Points below which a curve has no shape."""
FEW = 16
"""Points below which single lines count."""
SMALL = 1e-3
"""The loss of a policy is 0 at first, and may stay below this for long."""
OUT = 10.0
"""Times the first loss: what is above it has left the range of a run that learns."""
REGAINED = 0.35
"""The share of what was learned that a run which diverges loses again."""
WORSE = 1.4
"""Times the best loss: what ends above it, far outside of the noise, has diverged, however much was learned before."""
RISES = 5
"""Lines that all rise one after another are not noise."""


@dataclass(frozen=True, slots=True)
class Form:
    """A loss curve before anything in it is NaN."""

    buckets: list[Bucket]
    values: list[float]
    smoothed: list[float]
    sigma: float
    start: float
    best: float
    best_at: int
    end: float
    policy: bool
    """Of reinforcement learning."""

    @property
    def learned(self) -> float:
        return max(self.start - self.best, 0.0)

    @property
    def directionless(self) -> bool:
        """As a policy's loss is: below 0 now and then, or 0 at the first step."""
        return self.policy or min(b.low for b in self.buckets) < 0 or self.buckets[0].low == 0


def _calm(values: list[float], start: float) -> list[float]:
    """Return the values before an explosion that begins at once; all of them if there is none."""
    calm = [value for value in values if value <= OUT / 3 * start]
    return calm if start > 0 and 4 <= len(calm) < len(values) else values


def form(segment: Segment) -> Form | None:
    buckets = segment.track("loss").curve.finite()
    if segment.together["hidden"].count or segment.together["nothing"].count:
        buckets = [b for b in buckets if b.low != 0 or b.high != 0]  # not a loss, but that there was none
    if len(buckets) < ENOUGH:
        return None
    values = [b.mean for b in buckets]
    window = max(5, len(values) // 25) | 1
    smoothed = smooth(values, window)
    edge = max(2, min(len(values) // 10, 50))
    best = min(smoothed)
    best_at = smoothed.index(best)
    start = level(values[: max(edge // 2, 2)])
    return Form(
        buckets=buckets,
        values=values,
        smoothed=smoothed,
        sigma=noise(values[: best_at + 1] if best_at >= 10 else _calm(values, start)),
        start=start,
        best=best,
        best_at=best_at,
        end=level(values[-max(edge, 3) :]),
        policy=bool(segment.settings.get("rewards")),
    )


def shapes(segment: Segment) -> Iterator[Finding]:
    """Findings about finite values up to the place where they end."""
    found = form(segment)
    diverged = _rounds_rise(segment) or saturated(segment) or absurd(segment, throughout=True)
    if diverged is None and (found is None or len(found.values) < FEW):
        diverged = _explosion_of_few(segment)
    if diverged is None and found is not None:
        diverged = _divergence(segment, found)
    diverged = diverged or absurd(segment)
    if diverged is not None:
        yield diverged
    if diverged is None:
        exploded = _explosion(segment)
        if exploded is not None:
            yield exploded
        spiked = outlier(segment) or (None if found is None else _spike(found))
        if spiked is not None:
            yield spiked
        turned = _overfit(segment)
        if turned is not None:
            yield turned


def _divergence(segment: Segment, f: Form) -> Finding | None:
    rise = f.end - f.best
    if is_sum(f.values) or fills(f.values):
        return None
    if f.directionless:
        size = median(abs(v) for v in f.values[: max(len(f.values) // 2, 4)])
        diverged = f.end > 100 * max(size, SMALL) and f.end > OUT and _lasts(f.values, f.best, f.best_at)
    elif f.learned > 2 * f.sigma and f.learned > 0.02 * abs(f.start):
        much = rise > REGAINED * f.learned or (f.end > WORSE * f.best > 0 and rise > max(0.12 * f.learned, 20 * f.sigma))
        diverged = much and rise > 0.1 * abs(f.best) and _beyond_noise(f, f.best)
    else:
        diverged = f.end > 1.3 * f.start and _beyond_noise(f, f.start)
    if not diverged or f.best_at >= len(f.values) - max(4, len(f.values) // 10) or _swings(f, rise):
        return None
    began = _begin(f, rise)
    place = f.buckets[min(began + 1, len(f.buckets) - 1)].place
    around = range(max(0, f.best_at - BEST_NEAR), min(f.best_at + BEST_NEAR + 1, len(f.values)))
    best = f.buckets[min(around, key=f.values.__getitem__)]
    said = (
        f"The loss rises at {place} and stays up: about {number(f.end)} at the end of the log, against {number(best.mean)} at "
        f"its best ({best.place})."
    )
    norms = [b.mean for b in segment.track("grad_norm").curve.finite()]
    if norms and 0 < 20 * norms[0] < norms[-1]:
        said += f" The gradient norm goes from {number(norms[0])} to {number(norms[-1])}."
    causes = [
        Likely("The learning rate is too high, or there is no warm-up", "learning-rate-too-high"),
        Likely("Adam's second moment lags behind gradients that grew", "stale-second-moment"),
    ]
    if segment.resumed and began < 0.1 * len(f.values):
        causes.insert(
            0, Likely("It begins where the run was resumed: the optimizer's state was not restored", "optimizer-state-reset")
        )
    causes.append(Likely("A bad stretch of data, from which the run did not come back", "outlier-batch"))
    return Finding(
        kind="divergence",
        severity="failure",
        place=place,
        said=said,
        causes=tuple(causes),
        commands=(SLOWER, OBSERVE, "Guard(model, optimizer, checkpoints=...)    # goes back before the rise"),
    )


def _swings(f: Form, rise: float) -> bool:
    """Return whether the loss oscillates, as in a GAN: it was as high as at its end before, and came back."""
    low, high = f.best + 0.35 * rise, f.best + 0.85 * rise
    was_low, turns = False, 0
    for value in f.smoothed:
        if (value <= low) != was_low and not low < value < high:
            was_low = value <= low
            turns += was_low
    return turns >= 2


def _explosion_of_few(segment: Segment) -> Finding | None:
    """Report a few lines of which the last are far above the first, or above each other in a steep rise."""
    buckets = segment.track("loss").curve.finite()
    values = [b.mean for b in buckets]
    if len(values) < 2 or min(values) <= 0 or is_sum(values) or (len(values) >= ENOUGH and fills(values)):
        return None
    policy = bool(segment.settings.get("rewards"))
    at = (None if policy else _out_of_bounds(values) or _stays_up(values)) or _climb(values, policy)
    if at is None:
        return None
    place = buckets[at].place
    said = (
        f"The loss rises from {number(values[at - 1])} to {number(values[-1])}, from {place} to the last of {len(values)} lines."
    )
    causes = (
        Likely("The learning rate is too high, or there is no warm-up", "learning-rate-too-high"),
        Likely("Gradients that grow from step to step", "exploding-gradient"),
    )
    return Finding(kind="divergence", severity="failure", place=place, said=said, causes=causes, commands=(SLOWER, OBSERVE))


def _out_of_bounds(values: Sequence[float]) -> int | None:
    """Return the first line far above the first loss, where the last is a hundred times above it; of two, ten thousand times."""
    far = OUT * values[0]
    last = values[len(values) // 2 :]
    if values[-1] < (100 if len(values) > 2 else 1e4) * max(values[0], 0.1) or min(last) < far:
        return None
    return next(i for i, value in enumerate(values) if value >= far)


def _stays_up(values: Sequence[float]) -> int | None:
    """Return the second line, where all from there on are far above the first, and do not fall."""
    after = values[1:]
    return 1 if len(after) >= RISES and min(after) >= OUT * values[0] and after[-1] >= after[0] else None


def _climb(values: Sequence[float], policy: bool) -> int | None:
    """Return the line after the lowest, where the last three rise and the last is far above it."""
    if len(values) < 4 or not values[-3] < values[-2] < values[-1]:
        return None
    low = max(i for i, v in enumerate(values) if v == min(values))
    best, last = values[low], values[-1]
    if last - best < REGAINED * (max(values[: low + 1]) - best):
        return None  # noise about a loss that has learned
    if last >= (10 * best if not policy else max(1000 * best, OUT)):
        return low + 1
    steps = [b - a for a, b in pairwise(values[low:])]
    if policy or min(steps) <= 0:
        return None
    if low == 0:
        return 1 if len(values) >= RISES and max(steps) > 1.5 * best and last > 3 * best else None  # a running sum is flatter
    return low + 1 if low >= 3 and last > 5 * best else None


def _rounds_rise(segment: Segment) -> Finding | None:
    """Report a boosting run whose loss does not fall. `judge` adds the causes: those of all findings about boosting."""
    metric = "loss" if segment.track("loss").count else "eval_loss"
    buckets = segment.track(metric).curve.finite()
    values = [b.mean for b in buckets]
    if not segment.settings.get("rounds") or len(values) < 4:
        return None
    best = values.index(min(values))
    after = values[best:]
    if len(after) < 4 or any(a > b for a, b in pairwise(after)) or after[-1] < 1.02 * abs(after[0]):
        return None
    if metric == "eval_loss" and after[-1] < 1.02 * abs(values[0]):
        return None  # it had learned before, so this is overfitting
    name, place = segment.names.get(metric, "the loss"), buckets[best].place
    said = (
        f"{name} does not fall after {place}: it goes from {number(after[0])} to {number(after[-1])}. Each round of boosting "
        "lowers the loss on the training data, unless its step is too long or the objective does not fit the metric."
    )
    return Finding(kind="divergence", severity="failure", place=place, said=said)


def _beyond_noise(f: Form, above: float) -> bool:
    """Whether the end is up by more than noise makes it: in the loss itself or, where noise grows with it, in its logarithm."""
    if _lasts(f.values, above, f.best_at):
        return True
    if above <= 0 or min(f.values) <= 0:
        return False
    return _lasts([math.log(v) for v in f.values], math.log(above), f.best_at)


def _lasts(values: Sequence[float], above: float, best_at: int) -> bool:
    last = sorted(values[-max(4, len(values) // 10) :])
    rise = last[len(last) // 2] - above
    sigma = noise(values[: best_at + 1] if best_at >= 10 else values)
    return rise > sigma * max(3.0, 8.0 / len(last) ** 0.5) and last[len(last) // 4] > above + 0.4 * rise


def _begin(f: Form, rise: float) -> int:
    """The last point before the loss leaves its best for good: first in the smoothed curve, then exactly."""
    near = f.best + max(min(0.1 * rise, max(0.5 * abs(f.best), f.sigma)), min(f.sigma, 0.4 * rise))
    calm = max((i for i, v in enumerate(f.smoothed) if v <= near), default=0)
    reach = range(min(calm + 8, len(f.values) - 1), max(calm - 8, -1), -1)
    return next((i for i in reach if f.values[i] <= near), calm)


def _spike(f: Form) -> Finding | None:
    """The highest point, if nothing else in the run stands as far above its neighbours, and those on both sides are alike."""
    if f.directionless or len(f.values) < 16:
        return None
    reach = max(4, len(f.values) // 40)
    heights = [
        bucket.high - max(level(f.values[max(0, i - reach) : i]), level(f.values[i + 1 : i + 1 + reach]))
        for i, bucket in enumerate(f.buckets[:-2])
    ]
    i = max(range(reach, len(heights)), key=heights.__getitem__)
    others = max((h for j, h in enumerate(heights) if abs(j - i) > reach), default=0.0)
    around, height = f.buckets[i].high - heights[i], heights[i]
    if height < max(around, 8 * f.sigma, 4 * others, 0.3 * f.learned):
        return None
    if level(f.values[-max(3, len(f.values) // 10) :]) > around + 0.25 * height:
        return None
    place = f.buckets[i].place
    said = f"The loss jumps to {number(f.buckets[i].high)} at {place}, from about {number(around)}, and comes back."
    causes = (
        Likely("One unusual batch; the next ones are normal again", "outlier-batch"),
        Likely("Adam's second moment lagged behind a gradient that grew", "stale-second-moment"),
    )
    return Finding(
        kind="spike",
        severity="note",
        place=place,
        said=said,
        causes=causes,
        commands=('Policy(on_spike="skip")    # with the guard: such a step is not taken',),
    )


def _overfit(segment: Segment) -> Finding | None:
    evaluated = [b for b in segment.track("eval_loss").curve.finite() if b.finite == b.count]
    train = segment.track("loss").curve.finite()
    if len(evaluated) < 5 or len(train) < 4:
        return None
    values = [b.mean for b in evaluated]
    low = min(range(len(values)), key=values.__getitem__)
    after = values[low + 1 :]
    if len(after) < 3 or values[low] < 0:
        return None
    rise = level(after[-2:]) - values[low]
    jumps = sorted(abs(b - a) for a, b in zip(values[low:], values[low + 1 :], strict=False))
    monotone = sum(b > a for a, b in zip(values[low:], after, strict=False)) >= 0.6 * len(after)
    big = rise > 0.1 * values[low] and rise > 0.2 * max(values[0] - values[low], 0) and rise > 1.5 * jumps[len(jumps) // 2]
    turn = evaluated[low].place
    then = level([b.mean for b in train if b.place.order <= turn.order][-3:] or [train[0].mean])
    now = level([b.mean for b in train][-3:])
    if not (big and monotone and now < then and then - now > 0.05 * abs(then)):
        return None
    said = (
        f"The evaluation loss is lowest at {turn} ({number(values[low])}) and rises to {number(values[-1])}, while the training "
        f"loss falls from {number(then)} to {number(now)}. Use the checkpoint of that step."
    )
    causes = (Likely("The model memorises the training set: too little data, or too many epochs"),)
    return Finding(
        kind="overfit",
        severity="warning",
        place=turn,
        said=said,
        causes=causes,
        commands=("load_best_model_at_end=True, EarlyStoppingCallback    # or keep the checkpoint of that step",),
    )


def _explosion(segment: Segment) -> Finding | None:
    buckets = segment.track("grad_norm").curve.finite()
    if len(buckets) < 12:
        return None
    values = [b.mean for b in buckets]
    starts = [sorted(values[len(values) // 10 : end + 1]) for end in (len(values) // 4, len(values) // 2)]
    usual, top = min(((level(calm), calm[int(0.95 * (len(calm) - 1))]) for calm in starts), key=itemgetter(1))
    end = values[-max(3, len(values) // 12) :]
    if usual <= 0 or level(end) < max(50 * usual, 1.0) or min(end) < 10 * top:
        return None
    began = max((i for i, v in enumerate(values) if v <= 3 * top), default=0)
    place = buckets[min(began + 1, len(buckets) - 1)].place
    said = f"The gradient norm leaves its usual {number(usual)} at {place} and is {number(level(end))} at the end of the log."
    causes = (
        Likely("The gradient grows with every layer or time step", "exploding-gradient"),
        Likely("Loss and norms rise over many steps", "learning-rate-too-high"),
    )
    return Finding(kind="exploding-gradient", severity="warning", place=place, said=said, causes=causes, commands=(RUN, CHECK))
