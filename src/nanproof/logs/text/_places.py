"""Which step a line belongs to that does not name it: the step stands in a progress bar, in brackets, or in a line above."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from nanproof.logs._points import Point

BAR = re.compile(rb"\d%\|[^|\r\n]{0,400}\|\s{0,8}(\d{1,15})/(\d{1,15})\s{0,8}\[")
"""tqdm's: `12%|#2   | 12/100 [`."""
_WHOLE_BAR = re.compile(rb".*\d%\|[^|\r\n]{0,400}\|\s{0,8}\d{1,15}/\d{1,15}\s{0,8}\[[^\]]{0,400}\]\s*")
_KERAS = re.compile(rb"\s{0,99}(\d{1,15})/(\d{1,15})\s{0,8}(?:\[[=>.]+\]|\xe2\x94\x81|- \d+m?s)")
_KERAS_EPOCH = re.compile(rb"(?:^|[\r\n])Epoch (\d{1,9})(?:/(\d{1,9}))?\s*[\r\n]")
_NESTED = re.compile(rb"\[\s{0,8}(\d{1,9})\]\s{0,8}\[\s{0,8}(\d{1,15})\s{0,8}/\s{0,8}(\d{1,15})\]")
_TWICE = re.compile(rb"\[\s{0,8}(\d{1,9})\s{0,8}/\s{0,8}\d{1,9}\]\s{0,2}\[\s{0,8}(\d{1,15})\s{0,8}/\s{0,8}(\d{1,15})\]")
"""Swin's and its descendants': `Train: [epoch/epochs][step/steps]`, both from 0."""
_SAMPLES = re.compile(rb"Epoch:? (\d{1,9}) \[(\d{1,15})/(\d{1,15}) \(")
_COUNT = re.compile(rb"(?:Iter|iter)\w{0,9}\s?\(?\w{0,9}\)?\s?\[\s{0,8}(\d{1,15})\s{0,8}/\s{0,8}(\d{1,15})\]")
_PAIR = re.compile(rb"\[(\d{1,9}),\s{0,8}(\d{1,15})\] ")
_BARE = re.compile(rb"\s{0,9}(\d{1,12}) \| ")
_OF = re.compile(rb"\s{0,9}(\d{1,15})/(\d{1,15})[:,] ")
_SPOKEN = re.compile(rb"(?:^|[\]|,]|- )\s{0,9}(\d{1,12}) {0,2}(epoch|iter(?:ation)?|step|batch)(?:e?s)?(?=[\s,|])")
"""The number before its name: "000 epoch, 02000 iter, loss 2.5"."""
_FIRST = re.compile(rb"\[\s{0,8}(\d{1,15})\s{0,8}/\s{0,8}(\d{1,15})\] ")
_HEADING = re.compile(
    rb"(?:^|[\r\n])[^\r\n]{0,99}?(?<![\w.])(epoch|global[_ ]step|step|iteration)[ :=#]{1,12}(\d{1,9})"
    rb"(?:\s?/\s?\d{1,9})?[ \t:.=-]{0,99}(?=[\r\n]|$)",
    re.I,
)
"""A line that names a step or an epoch and nothing after it; the values stand in the lines below."""
MOST_EPOCHS = 1e9
_BELOW = 40
"""How many lines below it a step counts. An epoch counts until the next."""


class Places:
    """Finds steps, and remembers how often a bar came to its end."""

    def __init__(self) -> None:
        self._last = (0, 0)
        self._turns = 0
        self._keras: tuple[float, float | None] | None = None
        """Epoch and epochs, of the heading above."""
        self._epoch: float | None = None
        self._above: tuple[bytes, float, int] | None = None
        self._step = 0.0
        self._spacing = 1.0
        self._offset = 0.0

    def of(self, text: bytes, before: bytes, point: Point, settings: dict[str, float]) -> tuple[Point | None, bool]:
        """The point with its step, None if it is of no step; and whether that is from a bar. `before` is the text above."""
        bar = BAR.search(text)
        if bar is not None and b"{" in text:  # a dictionary: the bar after it is of its step, the one before may be older
            if b"}" not in text[: bar.start()]:
                return point, False
            settings["steps"] = float(bar[2])
            return replace(point, step=float(bar[1])), False
        if bar is not None:
            return self.in_bar(int(bar[1]), int(bar[2]), point, settings), True
        if (keras := _KERAS.match(text)) is not None:
            for epoch in _KERAS_EPOCH.finditer(b"\n" + before + b"\n"):
                self._keras = float(epoch[1]), None if epoch[2] is None else float(epoch[2])
            if self._keras is not None:
                number, epochs = self._keras
                point = replace(point, epoch=number)
                settings.update({} if epochs is None else {"epochs": epochs})
            return self.in_bar(int(keras[1]), int(keras[2]), point, settings), True
        point = _in_brackets(text, point, settings)
        return (point if b"{" in text else self._headed(before, point)), False

    def _headed(self, before: bytes, point: Point) -> Point:
        low = before.lower()
        for heading in _HEADING.finditer(before) if b"epoch" in low or b"step" in low or b"iteration" in low else ():
            if b"best" not in heading[0].lower():
                self._above = heading[1].lower(), float(heading[2]), point.line
        if point.step is not None or point.epoch is not None or self._above is None:
            self._above = self._above if point.step is None and point.epoch is None else None
            return point
        name, value, line = self._above
        if name == b"epoch":
            return replace(point, epoch=value)
        return replace(point, step=value) if point.line - line <= _BELOW else point

    def in_bar(self, count: int, total: int, point: Point, settings: dict[str, float]) -> Point | None:
        counted = point.epoch is not None and point.epoch.is_integer() and abs(point.epoch) < MOST_EPOCHS
        if point.epoch is not None and counted:  # "Epoch 3:" before the bar, which starts anew
            if not count:
                return None  # it starts with the values of the epoch before
            epochs = settings.get("epochs")  # "Epoch 3/10" counts from 1
            if epochs is not None:
                settings["steps"] = epochs * total
            done = max(int(point.epoch) - (0 if epochs is None else 1), 0)
            step, part = float(done * total + count), done + count / max(total, 1)
            return replace(point, step=step, epoch=part, settings=settings)
        last, of = self._last
        if count < last and total == of and last >= 0.98 * of:
            self._turns += 1  # a bar for each epoch
        self._last = count, total
        if not self._turns:
            settings["steps"] = float(total)
        return replace(point, step=float(self._turns * total + count), settings=settings)

    def passes(self, steps: Sequence[float], epochs: Sequence[float] | None) -> bool:
        """Whether a batch goes on with the steps as they are. Remembers its end if so."""
        if epochs is None:
            return True
        if self._offset or steps[0] <= self._step or epochs[-1] < epochs[0]:
            return False
        if epochs[-1].is_integer():
            self._spacing = steps[-1] - steps[-2] if epochs[-1] == epochs[-2] else self._spacing
            self._epoch, self._step = epochs[-1], steps[-1]
        return True

    def going_on(self, point: Point) -> Point:
        """With a step that goes on where the log's own starts anew in each epoch, as in `Epoch [2/5], Step [100/600]`."""
        step, epoch = point.step, point.epoch
        if step is None or epoch is None or not epoch.is_integer():
            return point
        if self._epoch is not None and epoch > self._epoch and step < self._step:
            self._offset += point.settings.get("steps", self._step + self._spacing)
        elif step > self._step and epoch == self._epoch:
            self._spacing = step - self._step
        self._epoch, self._step = epoch, step
        if not self._offset:
            return point
        planned = {name: value for name, value in point.settings.items() if name != "steps"}
        if "steps" in point.settings and "epochs" in planned:
            planned["steps"] = point.settings["steps"] * planned["epochs"]
        return replace(point, step=step + self._offset, settings=planned)


def _in_brackets(text: bytes, point: Point, settings: dict[str, float]) -> Point:
    if (nested := _NESTED.search(text)) is not None:
        number, count, total = map(int, nested.groups())
        number -= 0 if text[: nested.start()].rstrip().endswith(b":") else 1
        return replace(point, step=float(max(number, 0) * total + count), epoch=number + count / max(total, 1))
    if (twice := _TWICE.search(text)) is not None:
        number, count, total = map(int, twice.groups())
        return replace(point, step=float(number * total + count), epoch=number + count / max(total, 1))
    if (samples := _SAMPLES.search(text)) is not None:
        number, count, total = map(int, samples.groups())
        return replace(point, step=float(max(number - 1, 0) * total + count))
    if (pair := _PAIR.match(text)) is not None:
        return replace(point, step=float(pair[2]), epoch=float(pair[1]))
    if (counted := _COUNT.search(text) or _FIRST.match(text) or _OF.match(text)) is not None:
        settings["steps"] = float(counted[2])
        return replace(point, step=float(counted[1]))
    spoken = {name: float(value) for value, name in reversed(_SPOKEN.findall(text, 0, 200))}
    if spoken:
        epoch = spoken.pop(b"epoch", point.epoch)
        return replace(point, step=next(iter(spoken.values()), None), epoch=epoch)
    if point.epoch is None and (bare := _BARE.match(text)) is not None:
        return replace(point, step=float(bare[1]))
    return point


def last_drawn(text: bytes) -> int:
    """Where the last of several bars in a line begins, with the words before it: the others are older. 0 where there is one."""
    bars = [match.end() for match in BAR.finditer(text)]
    return text.find(b"]", bars[-2]) + 1 if len(bars) > 1 else 0


def after_bar(text: bytes) -> int:
    """Where a message begins that stands in the line of a bar, after it; 0 without one."""
    if b"]" not in text or (bar := None if b"%|" not in text else _WHOLE_BAR.match(text)) is None:
        return 0
    return bar.end() if text[bar.end() :].strip() else 0


def last_bar(text: bytes) -> tuple[int, int] | None:
    bars = BAR.findall(text)
    return (int(bars[-1][0]), int(bars[-1][1])) if bars else None


def first_bar(text: bytes, total: int | None) -> tuple[int, int] | None:
    """The first bar of that many steps."""
    return next(((int(bar[0]), int(bar[1])) for bar in BAR.findall(text) if int(bar[1]) == total), None)
