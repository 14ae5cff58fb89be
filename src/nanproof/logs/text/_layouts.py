"""Lines that differ only in their numbers are read with one pattern, made from the first of them.

Looking for names in every line costs tens of microseconds. A log repeats itself, so the line that was understood becomes a
pattern: the text as it is, a group for each value that counted, any number where another number stood. A line that fits has the
same meaning; one that does not goes the long way. Lines that follow each other and fit are one batch: their numbers are
converted a column at a time.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nanproof.logs._points import METRICS, Batch, Point
from nanproof.logs.text._names import TERM, finite
from nanproof.logs.text._values import PLAIN

MOST = 6
"""Kept at a time, the last used first."""
FEW = 4
"""Lines that make a batch."""
NEAR = 1 << 13
"""How many bytes the search for the next lines of a batch covers at first. It doubles as long as all lines fit."""
TRIES = 200
"""Made for one log. One that never repeats itself would only pay for making them."""

_VALUE = rb"(" + PLAIN + rb"|[+-]?(?:[nN]a[nN]|[iI]nf(?:inity)?))"
_PLACE = rb"(" + PLAIN + rb")"
_LETTERS = rb"([-+.\deEnaifNAIF]+)"
"""The characters of such a value. Matching them is twice as fast; the conversion tells whether they are a number."""
_DRAWING = rb"[ ]{0,8}\d{1,3}%\|[^|\r\n]{0,400}\|\s{0,8}(\d{1,15})"
_LOOSE = re.compile(rb"(?<![\w/.@+-])" + PLAIN + rb"|(?<=\d)[ \t]+|[ \t]{2,}|[ \t](?=[+-]?[\dnNiI])")
_DIGITS = rb"[-+]?\d[-+.\deE]*"
"""A number whose value does not count."""
_LOOSE_DIGITS = rb"[-+.\deE]+"
"""The same, but twice as fast to match. What it matches in addition changes no value."""


def rounded_away(rate: bytes) -> bool:
    """Whether a learning rate of 0 may be a small one with the decimals that were printed: 0.000 may, 0.0 and 0.00e+00 are 0."""
    return rate.startswith(b"0.00") and not rate.strip(b"0.")


@dataclass(frozen=True, slots=True)
class Span:
    """A value that counted: where it stands, and what it is."""

    start: int
    end: int
    role: str


class Layout:
    """The pattern of one kind of line."""

    def __init__(
        self,
        text: bytes,
        spans: Sequence[Span],
        fixed: Sequence[tuple[int, int]],
        like: Point,
        bar: re.Match[bytes] | None = None,
    ) -> None:
        """`fixed` are places whose numbers must stay as they are; `bar` is a progress bar that says which step it is."""
        parts: list[bytes] = []
        at = 0
        spans = list(spans)
        if bar is not None:
            drawing = len(text[: bar.start() + 1].rstrip(b"0123456789").rstrip(b" "))
            spans.append(Span(drawing, bar.end(1), "bar"))
            fixed = [*fixed, bar.span(2)]
        spans.sort(key=lambda span: span.start)
        for span in spans:
            pattern = _DRAWING if span.role == "bar" else _PLACE if span.role in ("step", "epoch") else _VALUE
            parts += [_loosened(text, at, span.start, fixed), pattern]
            at = span.end
        parts += [_loosened(text, at, max(at, len(text.rstrip(b" \t"))), fixed), rb"[ \t]*[\r\n]"]
        self.match = re.compile(b"".join(parts)).match
        loose = (_LETTERS if part in (_VALUE, _PLACE) else part.replace(_DIGITS, _LOOSE_DIGITS) for part in parts)
        self._lines = re.compile(rb"(?m)^" + b"".join(loose)).findall
        roles = [span.role for span in spans]
        self.total = int(bar[2]) if bar is not None else None
        """Of the bar."""
        self._bar = roles.index("bar") if bar is not None else 0
        self._values = [(index, role) for index, role in enumerate(roles) if role in METRICS]
        self._terms = [(index, role[len(TERM) :]) for index, role in enumerate(roles) if role.startswith(TERM)]
        self._like = like
        self._step = roles.index("step") if "step" in roles else None
        self._epoch = roles.index("epoch") if "epoch" in roles else None
        self._rate = roles.index("lr") if "lr" in roles else 0
        self._refused: tuple[bytes, int] = b"", 0
        self.settings = (
            like.settings if bar is None else {name: like.settings[name] for name in ("epochs",) if name in like.settings}
        )

    def count(self, match: re.Match[bytes]) -> int:
        """Where the bar is."""
        return int(match[self._bar + 1])

    def point(self, match: re.Match[bytes], line: int) -> Point:
        groups = match.groups()
        found = [float(group) for group in groups]
        values = {role: found[index] for index, role in self._values}
        if values.get("lr") == 0 and rounded_away(groups[self._rate]):
            del values["lr"]
        return Point(
            values,
            None if self._step is None else finite(found[self._step]),
            None if self._epoch is None else finite(found[self._epoch]),
            line,
            self._like.skipped_in_all,
            self.settings,
            terms={name: found[index] for index, name in self._terms},
            names=self._like.names,
        )

    def batch(self, data: bytes, at: int, line: int) -> tuple[Batch, int] | None:
        """Return the lines from `at` on that fit, and where they end. None if they are few, or have no step."""
        if self._step is None or self.total is not None or (self._refused[0] is data and at < self._refused[1]):
            return None
        rows: list[tuple[bytes, ...]] = []
        while len(rows) < FEW:
            match = self.match(data, at)
            if match is None or data[match.end() - 1] != 10:
                return None
            rows.append(match.groups())
            at = match.end()
        near = NEAR
        while (end := data.rfind(b"\n", at, at + near) + 1) > at:
            more = self._lines(data, at, end)
            if len(more) < data.count(b"\n", at, end) or data.find(b"\r", at, end) >= 0:
                break  # one of them does not fit
            rows += more
            at, near = end, 2 * near
        while (match := self.match(data, at)) is not None and data[match.end() - 1] == 10:
            rows.append(match.groups())
            at = match.end()
        try:
            columns = [list(map(float, column)) for column in zip(*rows, strict=True)]
        except ValueError:
            self.refuse(data, at)
            return None
        values = {role: columns[index] for index, role in self._values}
        if "lr" in values and 0.0 in values["lr"]:
            self.refuse(data, at)  # it may have been rounded away
            return None
        epochs = None if self._epoch is None else columns[self._epoch]
        terms = {name: columns[index] for index, name in self._terms}
        return Batch(values, terms, columns[self._step], epochs, line, self._like), at

    def refuse(self, data: bytes, end: int) -> None:
        """Have the lines up to `end` read one at a time. Trying a batch again at each of them would take quadratic time."""
        self._refused = data, end


def _loosened(text: bytes, start: int, end: int, fixed: Sequence[tuple[int, int]]) -> bytes:
    parts: list[bytes] = []
    at = start
    for match in _LOOSE.finditer(text, start, end):
        if not match[0].isspace() and any(a < match.end() and match.start() < b for a, b in fixed):
            continue
        parts += [re.escape(text[at : match.start()]), rb"[ \t]+" if match[0].isspace() else _DIGITS]
        at = match.end()
    return b"".join([*parts, re.escape(text[at:end])])
