"""The shape of finite curves: a loss that diverges, spikes or never moves, an evaluation that turns, a gradient norm that explodes.

All thresholds are relative to what the run itself has learned and to its own noise, so that a loss in other units is judged
alike. Losses of reinforcement learning hover about 0 and have no direction: of them only an explosion is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median

from nanproof.logs.curve import Bucket, number
from nanproof.logs.finding import CHECK, RUN, SCAN, Finding, Likely
from nanproof.logs.numbers import level, noise, smooth
from nanproof.logs.story import Segment

ENOUGH = 8
"""Points below which a curve has no shape."""


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

    @property
    def learned(self) -> float:
        return max(self.start - self.best, 0.0)

    def sigma_at(self, index: int) -> float:
        """The noise near a place: of the points just before it, where the curve is not what is judged."""
        near = slice(max(0, index - 40), index + 5)
        return min(noise(self.values[near], self.smoothed[near]) or self.sigma, self.sigma) if index > 5 else self.sigma

    @property
    def directionless(self) -> bool:
        """As a policy's loss is: below 0 now and then, or 0 at the first step."""
        return min(b.low for b in self.buckets) < 0 or self.buckets[0].low == 0


def form(segment: Segment, before: int | None = None) -> Form | None:
    buckets = segment.track("loss").curve.finite(before)
    if len(buckets) < ENOUGH:
        return None
    values = [b.mean for b in buckets]
    window = max(3, len(values) // 25) | 1
    smoothed = smooth(values, window)
    edge = max(2, min(len(values) // 10, 50))
    best = min(smoothed)
    return Form(
        buckets=buckets,
        values=values,
        smoothed=smoothed,
        sigma=noise(values, smoothed),
        start=level(values[: max(edge // 2, 2)]),
        best=best,
        best_at=smoothed.index(best),
        end=level(values[-max(edge, 3) :]),
    )


def shapes(segment: Segment, before: int | None) -> Iterator[Finding]:
    """Findings about finite values up to the place where they end."""
    found = form(segment, before)
    diverged = None
    if found is not None:
        diverged = _divergence(segment, found)
        if diverged is not None:
            yield diverged
    if diverged is None:
        exploded = _explosion(segment, before)
        if exploded is not None:
            yield exploded
        if found is not None:
            spiked = _spike(found)
            if spiked is not None:
                yield spiked
        flat = _never_learned(segment, found)
        if flat is not None:
            yield flat
        turned = _overfit(segment)
        if turned is not None:
            yield turned


def _divergence(segment: Segment, f: Form) -> Finding | None:
    rise = f.end - f.best
    last = sorted(f.values[-max(4, len(f.values) // 10) :])
    stays = last[len(last) // 4] > f.best + 0.4 * rise
    if f.directionless:
        size = median(abs(v) for v in f.values[: max(len(f.values) // 2, 4)])
        diverged = f.end > 100 * max(size, 1e-12) and stays
    elif f.learned > 3 * f.sigma and f.learned > 0.02 * abs(f.start):
        diverged = rise > 0.35 * f.learned and rise > 6 * f.sigma_at(f.best_at) and rise > 0.1 * abs(f.best) and stays
    else:
        diverged = f.end > 1.3 * f.start and f.end - f.start > 6 * f.sigma_at(f.best_at) and stays
    if not diverged:
        return None
    began = max((i for i, v in enumerate(f.values) if v <= f.best + max(0.1 * rise, f.sigma_at(f.best_at))), default=0)
    place = f.buckets[min(began + 1, len(f.buckets) - 1)].place
    low = f.buckets[f.best_at]
    said = (
        f"The loss rises from {number(f.values[began])} at {place} and stays up: {number(f.end)} at the end of the log, "
        f"against {number(f.best)} at its best ({low.place})."
    )
    norm = segment.track("grad_norm")
    if norm.count and norm.low > 0 and norm.high > 20 * norm.low:
        said += f" The gradient norm goes from {number(norm.low)} up to {number(norm.high)}."
    causes = [
        Likely("Loss and gradient rise together over many steps", "learning-rate-too-high"),
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
        commands=(RUN, "Guard(model, optimizer, checkpoints=...)    # goes back before the rise", SCAN),
    )


def _spike(f: Form) -> Finding | None:
    """The highest point, if it stands far above its neighbours on both sides and they are alike."""
    if f.directionless or len(f.values) < 16:
        return None
    reach = max(3, len(f.values) // 40)
    best: tuple[float, int, float] | None = None
    for i in range(reach, len(f.values) - 2):
        if f.buckets[i].high < 1.5 * f.smoothed[i]:
            continue
        sides = level(f.values[i - reach : i]), level(f.values[i + 1 : i + 1 + reach])
        around = max(sides)
        height = f.buckets[i].high - around
        if height > max(around, 12 * f.sigma, 0.3 * f.learned) and (best is None or height > best[0]):
            best = (height, i, around)
    if best is None:
        return None
    height, i, around = best
    after = level(f.values[-max(3, len(f.values) // 10) :])
    if after > around + 0.25 * height:
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


def _never_learned(segment: Segment, f: Form | None) -> Finding | None:
    """The loss is as high as at the start, and that can be said to within a percent."""
    if f is None or f.directionless or len(f.values) < 30 or segment.resumed or _late_start(segment):
        return None
    third = len(f.values) // 3
    parts = [level(f.values[:third]), level(f.values[third : 2 * third]), level(f.values[-third:])]
    size = abs(parts[0])
    unsure = 1.25 * f.sigma / third**0.5
    first = level(f.values[:3])
    if (
        size == 0
        or unsure > 0.005 * size
        or max(parts) - min(parts) > 0.01 * size
        or abs(first - parts[2]) > max(0.01 * size, 3 * f.sigma)
    ):
        return None
    lr = segment.track("lr")
    said = f"The loss is {number(parts[0])} in the first third of the log and {number(parts[2])} in the last: it has not moved."
    if lr.count and lr.high > 0:
        said += f" The learning rate is up to {number(lr.high)}."
    causes = (
        Likely("The path from the loss to the parameters is cut (detach, no_grad), or they are frozen", "no-gradient-path"),
        Likely("The optimizer holds other tensors than the model", "optimizer-foreign-parameters"),
        Likely("Updates round away in half-precision weights", "bf16-update-rounding"),
        Likely("Every unit of a ReLU is off", "dead-units"),
    )
    return Finding(
        kind="never-learned", severity="warning", place=f.buckets[0].place, said=said, causes=causes, commands=(CHECK, RUN)
    )


def _late_start(segment: Segment) -> bool:
    """The log begins in the middle of a run, which may have learned what it can."""
    first, last = segment.first, segment.last
    return bool(first and last and first.step and last.step and first.step > 0.2 * last.step)


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
        f"The evaluation loss is lowest at {turn} ({number(values[low])}) and rises to {number(values[-1])}, while the training loss "
        f"falls from {number(then)} to {number(now)}. The checkpoint of that moment is the best."
    )
    causes = (Likely("The model learns the training samples by heart: too few of them, or too many epochs"),)
    return Finding(
        kind="overfit",
        severity="warning",
        place=turn,
        said=said,
        causes=causes,
        commands=("load_best_model_at_end=True, EarlyStoppingCallback    # or keep the checkpoint of that step",),
    )


def _explosion(segment: Segment, before: int | None) -> Finding | None:
    buckets = segment.track("grad_norm").curve.finite(before)
    if len(buckets) < 12:
        return None
    values = [b.mean for b in buckets]
    half = values[len(values) // 10 : len(values) // 2 + 1]
    usual, top = level(half), sorted(half)[int(0.95 * (len(half) - 1))]
    end = values[-max(3, len(values) // 12) :]
    if usual <= 0 or level(end) < 50 * usual or min(end) < 10 * top:
        return None
    began = max((i for i, v in enumerate(values) if v <= 3 * top), default=0)
    place = buckets[min(began + 1, len(buckets) - 1)].place
    said = f"The gradient norm leaves its usual {number(usual)} at {place} and is {number(level(end))} at the end, {level(end) / usual:.0f} times that."
    causes = (
        Likely("The gradient grows with every layer or time step", "exploding-gradient"),
        Likely("Loss and norms rise over many steps", "learning-rate-too-high"),
    )
    return Finding(kind="exploding-gradient", severity="warning", place=place, said=said, causes=causes, commands=(RUN, CHECK))
