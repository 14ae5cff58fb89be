"""Tables inside a text log: a line of names, and rows of numbers below it, as YOLO, fastai, spaCy and notebooks print them."""

from __future__ import annotations

import re

from nanproof.logs._points import METRICS
from nanproof.logs.text._names import Found, meaning, number

_NAME = re.compile(r"[A-Za-z#_][\w ./()#%@-]{0,39}")
_RULE = re.compile(rb"[\s|:=+-]*")
_COUNTED = re.compile(rb"(\d{1,12})/\d{1,12}")


class Columns:
    """The names of a table, for reading its rows."""

    def __init__(self, separator: bytes | None, names: list[Found | None]) -> None:
        self._separator = separator
        self._names = names

    @classmethod
    def of(cls, text: bytes) -> Columns | None:
        """None if this line is no line of names: it needs two or more, and a loss among them."""
        if b"  " not in text and b"|" not in text and b"\t" not in text:
            return None
        separator = b"|" if b"|" in text else b"\t" if b"\t" in text.strip() else None
        if len(text) > 1000 or b"loss" not in text.lower():
            return None
        parts = re.split(rb"\s{2,}", text.strip()) if separator is None else _cells(text, separator)
        said = [part.decode("utf-8", "replace") for part in parts]
        if not 2 <= len(said) <= 60 or not all(_NAME.fullmatch(name) and len(name.split()) <= 3 for name in said):
            return None
        found = [meaning(name) for name in said]
        return cls(separator, found) if any(name is not None and name[0] in ("loss", "eval_loss") for name in found) else None

    def row(self, text: bytes) -> list[tuple[Found, float]] | None:
        """Names and values; empty for a rule between rows, None where the table has ended."""
        if _RULE.fullmatch(text, 0, 400) and len(text) <= 400:
            return []
        cells = text[:4000].split() if self._separator is None else _cells(text[:4000], self._separator)
        if len(cells) < len(self._names) or (self._separator is not None and len(cells) > len(self._names)):
            return None
        pairs = []
        for name, cell in zip(self._names, cells, strict=False):
            if name is None:
                continue
            counted = _COUNTED.fullmatch(cell)
            value = number(counted[1] if counted is not None else cell.rstrip(b":"))
            if value is None and name[0] in METRICS and cell not in (b"", b"-", b"No", b"None"):
                return None
            pairs += [(name, value)] if value is not None else []
        return pairs if any(role in METRICS for (role, _), _ in pairs) else None


def _cells(text: bytes, separator: bytes) -> list[bytes]:
    return [cell.strip() for cell in text.strip().strip(b"|").split(separator)]
