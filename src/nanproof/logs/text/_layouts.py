"""Lines that differ only in their numbers are read with one pattern, made from the first of them.

Looking for names in every line costs tens of microseconds. A log repeats itself, so the line that was understood becomes a
pattern: the text as it is, a group for each value that counted, any number where another number stood. A line that fits has the
same meaning; one that does not goes the long way.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nanproof.logs._points import METRICS, Point
from nanproof.logs.text._names import finite

MOST = 6
"""Kept at a time, the last used first."""
TRIES = 200
"""Made for one log. One that never repeats itself would only pay for making them."""

_NUMBER = rb"[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?"
_VALUE = rb"(" + _NUMBER + rb"|[+-]?(?:[nN]a[nN]|[iI]nf(?:inity)?))"
_PLACE = rb"(" + _NUMBER + rb")"
_DRAWING = rb"[ ]{0,8}\d{1,3}%\|[^|\r\n]{0,400}\|\s{0,8}(\d{1,15})"
_LOOSE = re.compile(rb"(?<![\w/.@+-])" + _NUMBER + rb"|[ \t]+")


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
            pattern = _DRAWING if span.role == "bar" else _VALUE if span.role in METRICS else _PLACE
            parts += [_loosened(text, at, span.start, fixed), pattern]
            at = span.end
        parts += [_loosened(text, at, len(text), fixed), rb"[ \t]*\n" if bar is None else rb"[ \t]*[\r\n]"]
        self.match = re.compile(b"".join(parts)).match
        roles = [span.role for span in spans]
        self.total = int(bar[2]) if bar is not None else None
        """Of the bar."""
        self._bar = roles.index("bar") if bar is not None else 0
        self._values = [(index, role) for index, role in enumerate(roles) if role in METRICS]
        self._step = roles.index("step") if "step" in roles else None
        self._epoch = roles.index("epoch") if "epoch" in roles else None
        self._rate = roles.index("lr") if "lr" in roles else 0
        self._in_all = like.skipped_in_all
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
            self._in_all,
            self.settings,
        )


def _loosened(text: bytes, start: int, end: int, fixed: Sequence[tuple[int, int]]) -> bytes:
    parts: list[bytes] = []
    at = start
    for match in _LOOSE.finditer(text, start, end):
        if not match[0].isspace() and any(a < match.end() and match.start() < b for a, b in fixed):
            continue
        parts += [re.escape(text[at : match.start()]), rb"[ \t]+" if match[0].isspace() else _NUMBER]
        at = match.end()
    return b"".join([*parts, re.escape(text[at:end])])
