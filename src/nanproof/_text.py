"""Text from files, made safe to look at. A name or a message may hold anything: control characters that steer a terminal, marks
that turn the direction of writing round, a megabyte of one letter. All of it is shown, escaped and cut, and none of it acts."""

from __future__ import annotations

import logging
import re
import traceback
from typing import Any

CUT = 2000
"""Characters of a text that are kept, unless told otherwise."""


_LOGGED = 20_000
"""Characters of a message that are logged."""


def printable(text: str) -> str:
    """Names come from strangers: what would steer the terminal, turn the direction of writing round or not be seen is written as
    an escape instead."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shown(text: Any, most: int = CUT) -> str:
    """A text with what cannot be seen written as an escape, at most about `most` characters of it."""
    text = text if isinstance(text, str) else str(text)
    kept = re.sub(r"[^\n\t]+", lambda part: printable(part[0]), text[:most])
    return kept if len(text) <= most else f"{kept[:most]}\u2026 ({len(text):,} characters)"


def one_line(text: Any, most: int = CUT) -> str:
    """The same, on one line."""
    return " ".join(shown(text, most).split())


def legible(record: logging.LogRecord) -> bool:
    """Filter of the logger `nanproof`: messages hold names of files and classes, and texts of errors. A record that can be
    shown stays as it is. In others escapes stand for what cannot be seen, and further lines are indented, so that no name looks
    like a line of the log."""
    try:
        text = record.getMessage()
    except Exception:
        return True  # a wrong call: logging reports it itself
    if not text.isprintable():
        record.msg, record.args = shown(text, _LOGGED).replace("\n", "\n  "), ()
    if record.exc_info and record.exc_info[1] is not None and not record.exc_text:
        text = "".join(traceback.format_exception(record.exc_info[1]))
        safe = shown(text, 10 * _LOGGED)
        if safe != text:
            record.exc_text = safe.rstrip("\n")  # handlers take it instead of making their own
    return True


def size(count: float) -> str:
    """Bytes for a person."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            return f"{count:,.0f} {unit}" if unit == "B" else f"{count:,.1f} {unit}"
        count /= 1024
    raise AssertionError


def duration(seconds: float) -> str:
    """Seconds for a person: the two largest units."""
    if seconds < 60:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (whole, "s")]
    first = next(i for i, (count, _) in enumerate(parts) if count)
    return " ".join(f"{count} {unit}" for count, unit in parts[first : first + 2] if count)


def number(x: float | None) -> str:
    """A measured number, four digits of it."""
    return "unknown" if x is None else f"{x:.4g}"


def first_line(text: str) -> str:
    """Return the first line of a text, with an ellipsis if there are more."""
    first, _, rest = text.strip().partition("\n")
    return f"{first} ..." if rest.strip() else first
