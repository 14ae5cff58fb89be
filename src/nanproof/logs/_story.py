"""Story: what a log tells of a run, taken in a point at a time in bounded memory, so that a log of any length can be judged.

A log may hold several runs, or one that was resumed. Each is a segment of its own: its steps begin again where the last one's
had been before, and that is no jump of the loss.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from nanproof.logs._curve import Curve, Place, finite
from nanproof.logs._points import METRICS, Batch, Item, Note, Point, Sign

SEGMENTS = 64
TERMS = 24
"""How many other values of training are tracked."""
SINGLY = 16
"""A batch with a NaN, an Inf or a 0 is halved until it has at most this many points. Those are added one at a time."""
NOTES_KEPT = 8


@dataclass(slots=True)
class Streak:
    """Counts how often a condition held: first, last, how many times, and since when without a break."""

    count: int = 0
    first: Place | None = None
    last: Place | None = None
    since: Place | None = None
    """Begin of the stretch that reaches to the last point looked at; None if the last point was not so."""
    unbroken: int = 0
    longest: int = 0
    looked: int = 0
    """Points that could have been so."""
    before: int = 0
    """How many of them came before the first that was."""

    def look(self, so: bool, place: Place) -> None:
        self.looked += 1
        if not so:
            self.since, self.unbroken = None, 0
            return
        if not self.count:
            self.before = self.looked - 1
        self.count += 1
        self.unbroken += 1
        self.longest = max(self.longest, self.unbroken)
        self.first = self.first or place
        self.since = self.since or place
        self.last = place

    @property
    def scattered(self) -> bool:
        """Whether most points from the first on were so, with others in between to the end."""
        return self.count > 0.5 * (self.looked - self.before) and self.unbroken <= 0.5 * self.count

    def pass_over(self, count: int) -> None:
        """Count points for which it was not so."""
        self.looked += count
        self.since, self.unbroken = None, 0


@dataclass(slots=True)
class Track:
    """One metric."""

    curve: Curve = field(default_factory=Curve)
    bad: Streak = field(default_factory=Streak)
    """Values that are NaN or Inf."""
    zero: Streak = field(default_factory=Streak)
    first_bad: float = 0.0
    since_bad: float = 0.0
    """The first bad value of the stretch that reaches to the end."""
    last_finite: tuple[Place, float] | None = None
    first_finite: tuple[Place, float] | None = None
    low: float = math.inf
    high: float = -math.inf
    least: float = math.inf
    """The lowest but for values of exactly 0."""

    def add(self, value: float, place: Place) -> None:
        good = finite(value)
        if not good and not self.bad.count:
            self.first_bad = value
        self.bad.look(not good, place)
        if self.bad.unbroken == 1:
            self.since_bad = value
        self.zero.look(value == 0, place)
        if good:
            self.last_finite = (place, value)
            self.first_finite = self.first_finite or (place, value)
            self.low, self.high = min(self.low, value), max(self.high, value)
            self.least = min(self.least, value) if value else self.least
        self.curve.add(value, place)

    def extend(self, values: Sequence[float], place: Callable[[int], Place]) -> None:
        """Add values that are all finite and not 0."""
        self.bad.pass_over(len(values))
        self.zero.pass_over(len(values))
        low, high = min(values), max(values)
        self.first_finite = self.first_finite or (place(0), values[0])
        self.last_finite = (place(len(values) - 1), values[-1])
        self.low, self.high, self.least = min(self.low, low), max(self.high, high), min(self.least, low)
        self.curve.extend(values, place)

    @property
    def count(self) -> int:
        return self.bad.looked

    @property
    def lost(self) -> float:
        """NaN or Inf: the value at the place where `extent` says that it begins."""
        return self.since_bad if self.bad.since is not None and not self.bad.scattered else self.first_bad


TOGETHER: dict[str, Callable[[float, float], bool]] = {
    "hidden": lambda loss, norm: loss == 0 and not finite(norm),
    "nothing": lambda loss, norm: loss == 0 and norm == 0,
    "gradient": lambda loss, norm: finite(loss) and loss != 0 and not finite(norm),
    "still": lambda loss, norm: finite(loss) and loss != 0 and norm == 0,
}
"""What a loss and the norm of the gradient on the same line say together."""


@dataclass(slots=True)
class Noted:
    """Notes of one kind: how many, and the first and last few of them."""

    count: int = 0
    first: list[Note] = field(default_factory=list)
    last: Note | None = None
    place: Place = field(default_factory=Place)
    """Of the first, with the step and epoch of the point before it if it names none."""
    last_order: int = 0
    """How many points came before the last."""

    def add(self, note: Note, order: int, before: Place | None) -> None:
        if not self.count:
            step, epoch = (before.step, before.epoch) if before is not None else (None, None)
            self.place = Place(order, step if note.step is None else note.step, epoch if note.step is None else None, note.line)
        self.count += 1
        self.last, self.last_order = note, order
        if len(self.first) < NOTES_KEPT:
            self.first.append(note)


@dataclass(slots=True)
class Segment:
    """A run, or the part of it from one start to the next."""

    number: int = 0
    resumed: bool = False
    """It goes on from where an earlier one was, not from the start."""
    points: int = 0
    tracks: dict[str, Track] = field(default_factory=dict)
    terms: dict[str, Track] = field(default_factory=dict)
    """Other values of training, at most `TERMS` of them, by their names in the log."""
    names: dict[str, str] = field(default_factory=dict)
    """What the log calls each track."""
    exchanged: int = 0
    """Lines on which exactly one of the loss and the evaluation loss is a number: a table with a column for each."""
    missing: Streak = field(default_factory=Streak)
    """Lines that have no loss, where lines like them have one."""
    together: dict[str, Streak] = field(default_factory=lambda: {name: Streak() for name in TOGETHER})
    notes: dict[str, Noted] = field(default_factory=dict)
    settings: dict[str, float] = field(default_factory=dict)
    first: Place | None = None
    last: Place | None = None
    skipped_in_all: bool = True
    skipped_sum: float = 0.0
    offset: float = 0.0
    """Steps of the epochs before, in logs that count from 0 in each."""
    step_of_epoch: bool = False

    def add(self, point: Point) -> None:
        step = None if point.step is None else point.step + self.offset
        place = Place(self.points, step, point.epoch, point.line)
        self.points += 1
        self.settings.update(point.settings)
        if not point.values and not point.terms:
            return
        self.first, self.last = self.first or place, place
        self._name(point)
        for name, value in point.values.items():
            if name in METRICS:
                self._track(name).add(float(value), place)
        for name, value in point.terms.items():
            if (term := self._term(name)) is not None:
                term.add(float(value), place)
        if "loss" in point.values and "eval_loss" in point.values:
            self.exchanged += finite(point.values["loss"]) != finite(point.values["eval_loss"])
        if point.loss_missing or "loss" in point.values:
            self.missing.look(point.loss_missing, place)
        if "loss" in point.values and "grad_norm" in point.values:
            for name, so in TOGETHER.items():
                self.together[name].look(so(point.values["loss"], point.values["grad_norm"]), place)
        if "skipped" in point.values and finite(point.values["skipped"]):
            self.skipped_in_all = point.skipped_in_all
            self.skipped_sum = point.values["skipped"] + (0 if point.skipped_in_all else self.skipped_sum)

    def extend(self, batch: Batch) -> None:
        """Add points in which everything is finite and not 0."""
        order, steps, epochs = self.points, batch.steps, batch.epochs

        def place(i: int) -> Place:
            return Place(order + i, steps[i] + self.offset, None if epochs is None else epochs[i], batch.line + i)

        self.points += len(batch)
        self.settings.update(batch.like.settings)
        self.first, self.last = self.first or place(0), place(len(batch) - 1)
        self._name(batch.like)
        for name, column in batch.columns.items():
            self._track(name).extend(column, place)
        for name, column in batch.terms.items():
            if (term := self._term(name)) is not None:
                term.extend(column, place)
        if "loss" in batch.columns:
            self.missing.pass_over(len(batch))
            if "grad_norm" in batch.columns:
                for streak in self.together.values():
                    streak.pass_over(len(batch))

    def _name(self, point: Point) -> None:
        if point.names and not point.names.items() <= self.names.items():
            self.names = {**point.names, **self.names}

    def _track(self, name: str) -> Track:
        track = self.tracks.get(name)
        if track is None:
            track = self.tracks[name] = Track()
        return track

    def _term(self, name: str) -> Track | None:
        if name not in self.terms and len(self.terms) < TERMS:
            self.terms[name] = Track(Curve(256))
        return self.terms.get(name)

    def note(self, note: Note) -> None:
        self.notes.setdefault(note.kind, Noted()).add(note, self.points, self.last)

    def track(self, name: str) -> Track:
        return self.tracks.get(name) or Track()


COUNTED = 1e12


def _sound(point: Point) -> Point:
    """Steps and settings that count nothing are as good as not there."""
    settings = {name: value for name, value in point.settings.items() if abs(value) < COUNTED}
    step, epoch = _count(point.step), _count(point.epoch)
    if step == point.step and epoch == point.epoch and len(settings) == len(point.settings):
        return point
    return replace(point, step=step, epoch=epoch, settings=settings)


def _rises(values: Sequence[float], last: float | None, strictly: bool) -> bool:
    before = operator.lt if strictly else operator.le
    return (last is None or before(last, values[0])) and all(map(before, values, islice(values, 1, None)))


def _ordinary(values: Sequence[float]) -> bool:
    """Whether all of them are finite and none is 0; a sum with a NaN or an Inf in it is not finite."""
    return math.isfinite(sum(values)) and finite(max(values)) and finite(min(values)) and 0.0 not in values


def _count(value: float | None) -> float | None:
    return value if value is not None and abs(value) < COUNTED else None


class Story:
    """Everything that a log says, in order."""

    def __init__(self) -> None:
        self.segments: list[Segment] = [Segment()]
        self.points = 0
        self.refused = 0
        """Steps that a guard of nanproof refused."""
        self.dropped = 0
        """Segments that were left out of a log with too many."""
        self._step: float | None = None
        self._epoch: float | None = None
        self._stride = 1.0
        self._resume_said = False

    @property
    def now(self) -> Segment:
        return self.segments[-1]

    def add(self, item: Item) -> None:
        """Points and notes in the order of the log."""
        if isinstance(item, Batch):
            if self._goes_on(item):
                self._extend(item)
            else:
                for part in item.halves() if len(item) > SINGLY else item.points():
                    self.add(part)
            return
        if isinstance(item, Sign):
            self.now.settings[item.framework] = 1.0
            return
        if isinstance(item, Note):
            if item.kind == "resumed":
                self._resume_said = True
            self.now.note(replace(item, step=_count(item.step)))
            return
        item = _sound(item)
        if item.values or item.terms:
            self._place(item)
            self.points += 1
            self.refused += item.refused
        self.now.add(item)

    def _goes_on(self, batch: Batch) -> bool:
        """Whether these are ordinary points of the run that was read so far: later steps, and every value finite and not 0."""
        steps, epochs = batch.steps, batch.epochs
        if not _rises(steps, self._step, strictly=True) or not steps[-1] < COUNTED or "skipped" in batch.columns:
            return False
        if epochs is not None and not (_rises(epochs, self._epoch, strictly=False) and epochs[-1] < COUNTED):
            return False
        if any(abs(value) >= COUNTED for value in batch.like.settings.values()):
            return False
        return all(map(_ordinary, batch.columns.values())) and all(map(_ordinary, batch.terms.values()))

    def _extend(self, batch: Batch) -> None:
        steps, epochs = batch.steps, batch.epochs
        before = steps[-2] if len(steps) > 1 else self._step
        self._stride = steps[-1] - before if before is not None else self._stride
        if epochs is not None:
            known = epochs if self._epoch is None else [self._epoch, *epochs]
            self._stride_of_epochs = next((b - a for a, b in zip(known[-2::-1], known[:0:-1], strict=False) if b > a), 0.0) or (
                self._stride_of_epochs
            )
            self._epoch = epochs[-1]
        self._step = steps[-1]
        self._resume_said = False
        self.points += len(batch)
        self.now.extend(batch)

    def _place(self, point: Point) -> None:
        """Find out whether this point belongs to the same run as the last one."""
        step, epoch = point.step, point.epoch
        back = step is not None and self._step is not None and step < self._step - 2 * self._stride
        if back and epoch is not None and self._epoch is not None and epoch > self._epoch:
            # The log counts its steps from 0 in every epoch.
            assert self._step is not None
            self.now.offset += self._step + 1
            self.now.step_of_epoch = True
            back = False
        if step is None and epoch is not None and self._epoch is not None:
            back = epoch < self._epoch - 2 * self._stride_of_epochs
        if back or (self._resume_said and self.now.tracks and step is not None and self._step is not None and step < self._step):
            start = (step is None or step <= 2 * self._stride) and not self._resume_said
            if len(self.segments) >= SEGMENTS:
                del self.segments[1]
                self.dropped += 1
            self.segments.append(Segment(self.now.number + 1, resumed=not start, settings=dict(self.now.settings)))
        elif step is not None and self._step is not None and step > self._step:
            self._stride = step - self._step
        if epoch is not None and self._epoch is not None and epoch > self._epoch:
            self._stride_of_epochs = epoch - self._epoch
        self._resume_said = False
        self._step = step if step is not None else self._step
        self._epoch = epoch if epoch is not None else self._epoch

    _stride_of_epochs = 0.0
