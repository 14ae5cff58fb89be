"""Steps that a loss scaler left out, read from the learning-rate column.

Trainers advance the schedule only when the optimizer has stepped. A linear schedule moves by the same unit at each step, and a
cosine can be solved for its step: so what the logged rates have moved is how many steps were really taken. The log's own count
says how many were tried. Said only where one reading fits every point, fits by more than chance, and the stretches between
points differ: a schedule that moves evenly, however slowly, is just another schedule.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from nanproof.logs._curve import Place, number
from nanproof.logs._story import Segment
from nanproof.logs.judge._finding import CHECK, PROTECT, SCAN, Finding, Likely

POINTS = 400
LINE_STEPS = (10, 1, 5, 20, 25, 50, 100, 500, 2, 4, 8, 200, 250, 1000)
EPOCHS = (3.0, 1.0, 2.0, 4.0, 5.0, 6.0, 8.0, 10.0)
"""Usual settings, the likeliest first, for logs that do not say them."""
ROUND = tuple(x / 10 for x in range(10, 100))
"""Learning rates that people write have two digits."""
NO_SCALE_HELPS = (
    Likely("An output passes 65504 in fp16, at any loss scale", "fp16-activation-overflow"),
    Likely(
        "The model is loaded in fp16: keep trainable weights in fp32, and let autocast do the rest",
        "fp16-weights-with-grad-scaler",
    ),
    Likely("The data holds NaN or Inf, so that no scale helps", "nonfinite-batch"),
)


@dataclass(frozen=True, slots=True)
class Stretch:
    """From one point to the next."""

    place: Place
    """Of its end."""
    tried: int
    taken: int


@dataclass(frozen=True, slots=True)
class Skipping:
    """What the learning rates say."""

    stretches: tuple[Stretch, ...]
    base: float | None = None
    total: int | None = None
    each: int | None = None
    """Steps a line, where that had to be guessed."""
    epochs: float | None = None

    @property
    def tried(self) -> int:
        return sum(s.tried for s in self.stretches)

    @property
    def skipped(self) -> int:
        return self.tried - sum(s.taken for s in self.stretches)

    @property
    def began(self) -> Place:
        return next(s.place for s in self.stretches if s.taken < s.tried)


@dataclass(frozen=True, slots=True)
class Counting:
    """How many steps were tried at each point, and how many are planned."""

    tried: tuple[int, ...]
    total: int | None
    each: int | None = None
    epochs: float | None = None


def skipping(segment: Segment) -> Skipping | None:
    """None if no step was left out, or if it cannot be told."""
    rates = [b for b in segment.track("lr").curve.buckets if b.finite == b.count and b.last > 0]
    rates = rates[:: len(rates) // POINTS + 1]
    if len(rates) < 3 or segment.resumed:
        return None
    places, values = [b.place for b in rates], [b.last for b in rates]
    countings = list(_countings(segment, places))
    found = None
    bases = list(_bases(values, segment.settings))
    chances = len(countings) * len(bases)
    for counting in countings:
        for base in bases:
            found = found or _read_as(places, values, counting, base, 0, _linear, chances)
    if found is None and len(countings) == 1 and countings[0].total is not None:
        warmups = _warmups(values, countings[0].total, segment.settings)
        readings = [(base, warmup, shape) for base in bases for warmup in warmups for shape in (_linear, _cosine)]
        for base, warmup, shape in readings:
            found = found or _read_as(places, values, countings[0], base, warmup, shape, len(readings))
    if found is None and countings and countings[0].each is None:
        found = _units(places, values, countings[0])
    return found if found is not None and _is_news(found, segment) else None


def _is_news(found: Skipping, segment: Segment) -> bool:
    """Left out: schedules that stand still at their end, and the few steps that every scaler leaves out."""
    stretches = found.stretches
    if segment.track("grad_norm").bad.since is None:
        moving = max((i for i, s in enumerate(stretches) if s.taken), default=-1)
        stretches = stretches[: moving + (moving == len(stretches) - 1)]  # with the end, the stretch in which it was reached
    shares = {s.taken / s.tried for s in stretches[1:] if s.tried}
    skipped = sum(s.tried - s.taken for s in stretches)
    return len(shares) > 1 and skipped >= 3 and skipped > 0.05 * sum(s.tried for s in stretches)


def _countings(segment: Segment, places: Sequence[Place]) -> Iterator[Counting]:
    """From the log; else every usual setting that fits how its epochs advance."""
    settings = segment.settings
    planned = int(settings["steps"]) if settings.get("steps", 0) >= 1 else None
    if all(p.step is not None for p in places):
        tried = tuple(int(p.step or 0) for p in places)
        if all(a < b for a, b in itertools.pairwise(tried)):
            yield Counting(tried, planned)
        return
    seen = [p.epoch or 0.0 for p in places]
    apart = seen[-1] / len(seen)
    if apart <= 1e-9 or segment.track("lr").curve.each > 1 or any(abs(e - apart * i) > 0.011 for i, e in enumerate(seen, 1)):
        return
    lines = (int(settings["logging_steps"]),) if settings.get("logging_steps", 0) >= 1 else LINE_STEPS
    for end in (settings["epochs"],) if settings.get("epochs") else EPOCHS:
        for each in lines:
            in_epoch = round(each / apart)
            fits = in_epoch and all(abs(each * i / in_epoch - e) <= 0.0051 for i, e in enumerate(seen, 1))
            total = planned or int(end * in_epoch)
            if fits and seen[-1] <= end + 0.01:
                yield Counting(tuple(each * i for i in range(1, len(seen) + 1)), total, each, end)


def _bases(values: Sequence[float], settings: dict[str, float]) -> Iterator[float]:
    """The rate that the schedule starts from: said in the log, or a round number not far above what is seen."""
    if settings.get("lr", 0) > 0:
        yield settings["lr"]
        return
    top = max(values)
    power = 10.0 ** math.floor(math.log10(top))
    for digits in (*ROUND, *(10 * x for x in ROUND)):
        if top * (1 - 1e-9) <= digits * power <= 2 * top:
            yield digits * power


def resolutions(values: Sequence[float]) -> list[float]:
    """How far each number may be from the true one, as the log writes it: half of its last digit. 0 if it writes all digits."""
    places, digits = 0, 0
    for value in values:
        written, _, power = repr(value).partition("e")
        places = max(places, len(written.partition(".")[2].rstrip("0")) - int(power or 0))
        digits = max(digits, len(written.replace(".", "").strip("0-")))
    if digits > 9:
        return [0.0] * len(values)
    return [0.5 * max(10.0**-places, 10.0 ** (math.floor(math.log10(value)) - digits + 1)) for value in values]


Shape = Callable[[float, int], tuple[float, float]]
"""From the share of the base rate, and the steps of the decay, to the steps taken of it and how steeply they change."""


def _linear(share: float, steps: int) -> tuple[float, float]:
    return steps * (1 - share), steps


def _cosine(share: float, steps: int) -> tuple[float, float]:
    x = min(max(2 * share - 1, -1.0), 1.0)
    return steps / math.pi * math.acos(x), steps / math.pi * 2 / max(math.sqrt(1 - x * x), 1e-9)


def _warmups(values: Sequence[float], total: int, settings: dict[str, float]) -> list[int]:
    """Steps of the warm-up: said, or what people write, as a number or as a share of all steps."""
    if settings.get("warmup", 0) >= 1:
        return [int(settings["warmup"])]
    if values[0] >= max(values):
        return [0]
    shares = {math.ceil(total * percent / 100) for percent in (1, 2, 3, 5, 6, 10, 15, 20, 25, 30)}
    return sorted(w for w in {*shares, 5, 10, 20, 25, 30, 50, 100, 150, 200, 250, 300, 500, 1000, 2000} if w < total)


def _read_as(
    places: Sequence[Place],
    values: Sequence[float],
    counting: Counting,
    base: float,
    warmup: int,
    shape: Shape,
    chances: int,
) -> Skipping | None:
    """Read each rate as a rise of `base * taken / warmup` up to the highest, and as the shape of a decay to 0 after it."""
    total = counting.total
    if total is None or total <= warmup:
        return None
    grains = resolutions(values)
    top = values.index(max(values)) if warmup else -1
    read: list[tuple[Place, int, int]] = []
    chance = float(chances)
    for i, value in enumerate(values):
        share = value / base
        after, steep = shape(share, total - warmup)
        exact, slope = (share * warmup, float(warmup)) if i <= top else (warmup + after, steep)
        grain = 1e-12 + grains[i] / base
        if i == top and abs(exact - round(exact)) > 1e-7 + grain * slope:
            exact, slope = warmup + after, steep  # the highest that was logged is past the top
        slack = 1e-7 + grain * slope
        off = abs(exact - round(exact))
        if slack >= 0.5 or (slack > 0.12 and off > 1e-6):
            continue  # the digits do not say which step it is; unless they are all there are, as in 0.00028, and fit exactly
        if off > slack or exact < -slack:
            return None
        chance *= 2 * slack if not i or value != values[i - 1] else 1.0
        read.append((places[i], counting.tried[i], round(exact)))
    if chance > 0.01 or len(read) < 3 or len(read) < 0.8 * len(values):
        return None
    stretches = _stretches(read)
    return Skipping(stretches, base, total, counting.each, counting.epochs) if stretches else None


def _stretches(read: Sequence[tuple[Place, int, int]]) -> tuple[Stretch, ...] | None:
    """None if any takes more steps than it tries. A log that is a step ahead from the start counts from its first point."""
    from_first = read[0][1] - read[0][2] in (0, 1)
    at, at_taken = read[0][1:] if from_first else (0, 0)
    found = []
    for place, now, moved in read[1 if from_first else 0 :]:
        if not 0 <= moved - at_taken <= now - at:
            return None
        found.append(Stretch(place, now - at, moved - at_taken))
        at, at_taken = now, moved
    return tuple(found)


def _units(places: Sequence[Place], values: Sequence[float], counting: Counting) -> Skipping | None:
    """Where nothing is known of the schedule: the fastest of the falling stretches took all its steps; if many went as fast, and
    all others moved by whole fractions of that, the others left steps out."""
    start = values.index(max(values))
    start = max(i for i, value in enumerate(values) if value == values[start])
    falls = [a - b for a, b in zip(values[start:], values[start + 1 :], strict=False)]
    while falls and falls[-1] <= 0:
        falls.pop()
    tried = [b - a for a, b in zip(counting.tried[start:], counting.tried[start + 1 :], strict=False)][: len(falls)]
    if len(falls) < 8 or min(falls) < 0 or min(tried) < 1 or median(tried) > 1:
        return None  # of longer stretches none may be whole
    unit = max(fall / steps for fall, steps in zip(falls, tried, strict=True))
    grain = max(resolutions(values))
    if unit <= 0 or unit < 40 * grain:
        return None
    slack = 1e-5 + 4 * grain / unit
    if any(abs(fall / unit - round(fall / unit)) > slack for fall in falls):
        return None
    taken = [round(fall / unit) for fall in falls]
    whole = sum(took == steps for took, steps in zip(taken, tried, strict=True))
    if whole < max(3, 0.1 * len(falls)):
        return None
    found = zip(places[start + 1 :], tried, taken, strict=False)
    return Skipping(tuple(Stretch(*each) for each in found))


def skipped_only(segment: Segment) -> Finding | None:
    """Report skipped steps that only the learning rate shows."""
    moved = skipping(segment)
    return None if moved is None else skips(segment, moved)


def skips(segment: Segment, moved: Skipping) -> Finding:
    norm = segment.track("grad_norm")
    said = in_words(moved)
    if norm.bad.count:
        said += f" grad_norm is {number(norm.first_bad)} on {norm.bad.count} of {norm.count} lines."
    share = moved.skipped / moved.tried
    if share > 0.25:
        said += " A scale that is only too high costs a few steps: here the forward or the gradients are NaN at any scale."
    return Finding(
        kind="scaler-skipping",
        severity="failure" if share > 0.25 else "warning",
        place=moved.began,
        said=said,
        causes=NO_SCALE_HELPS,
        commands=(PROTECT, CHECK, SCAN),
    )


def in_words(moved: Skipping) -> str:
    """Return what the learning rates show, as sentences."""
    said = f"The learning rate shows that {moved.skipped} of {moved.tried} optimizer steps were skipped: "
    if moved.base is not None and moved.total is not None:
        said += f"{number(moved.base)} falls over {moved.total} steps, "
    taken = 0
    at = []
    for stretch in moved.stretches[:6]:
        taken += stretch.taken
        at.append(taken)
    few = ", ".join(map(str, at)) + (", ..." if len(moved.stretches) > 6 else "")
    said += f"and the schedule had moved {few} steps at the logged lines."
    if moved.each is not None:
        said += f" (Assumes a line every {moved.each} steps and {number(moved.epochs or 0)} epochs; the log states neither.)"
    return said
