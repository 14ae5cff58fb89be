"""Tables inside a text log: a line of names, and rows of numbers below it, as YOLO, fastai, spaCy and notebooks print them."""

from __future__ import annotations

import re

from nanproof.logs._points import METRICS
from nanproof.logs.text._names import COARSE, Found, is_reward, meaning, number

_NAME = re.compile(r"[A-Za-z#_][\w ./()#%@-]{0,79}")
_FRAMED = re.compile(rb"\s*[*=#-]{3,}\s*(\w[\w ]{0,39}(?:,\s?\w[\w ]{0,39}){1,20})\s*[*=#-]{3,}\s*")
_RULE = re.compile(rb"[\s|:=+-]*")
_COUNTS = re.compile(rb"\s*(?:epoch|step|iter|iteration)s? ", re.I)
_LOSSES = re.compile(rb"\b(train|training|valid|validation|val|test|eval) (loss)\b", re.I)
_MARGIN = re.compile(rb"^\s*(?:\[[^\]]{0,40}\]|#|[\d/-]{5,10}[-T ]\d\d:\d\d:\d\d(?:[.,]\d{1,6})?)(?=\s)")
"""What stands in front of a row: the share that is done, the sign of a comment, the time."""
_SHORT = {"E": Found("epoch", 0), "#": Found("step", COARSE)}
_COUNTED = re.compile(rb"(\d{1,12})/\d{1,12}")


class Columns:
    """The names of a table, for reading its rows."""

    def __init__(self, separator: bytes | None, names: list[Found | None], settings: dict[str, float]) -> None:
        self._separator = separator
        self._names = names
        self.settings = settings
        """What the names say of the run."""

    @classmethod
    def of(cls, text: bytes) -> Columns | None:
        """None if this line is not a line of names: it needs two or more, and a loss among them."""
        if len(text) > 1000:
            return None
        text = _MARGIN.sub(b"", text)
        if (framed := _FRAMED.fullmatch(text)) is not None:  # "****train_loss,train_acc****", with spaces or tabs in its rows
            return cls._named(None, framed[1].split(b","))
        separator = b"|" if b"|" in text else b"\t" if b"\t" in text.strip() else None
        if separator is not None:
            parts = _cells(text, separator)
        elif b"  " in text:
            parts = re.split(rb"\s{2,}", text.strip())
        elif _COUNTS.match(text):  # one space between columns, and within names
            parts = _LOSSES.sub(rb"\1_\2", text).split()
        else:
            return None
        return cls._named(separator, parts)

    @classmethod
    def _named(cls, separator: bytes | None, parts: list[bytes]) -> Columns | None:
        said = [part.strip().decode("utf-8", "replace") for part in parts]
        most = 8 if separator == b"|" else 3  # words
        if not 2 <= len(said) <= 60 or not all(_NAME.fullmatch(name) and len(name.split()) <= most for name in said):
            return None
        found = [_SHORT.get(name) or meaning(name) for name in said]
        settings = {"rewards": 1.0} if any(map(is_reward, said)) else {}
        known = any(name is not None and name.role in ("loss", "eval_loss") for name in found)
        return cls(separator, found, settings) if known else None

    def row(self, text: bytes) -> list[tuple[Found, float]] | None:
        """Names and values; empty for a rule between rows, None where the table has ended."""
        text = _MARGIN.sub(b"", text)
        if len(text) <= 400 and (_RULE.fullmatch(text) or text.startswith(b"#")):
            return []
        cells = text[:4000].split() if self._separator is None else _cells(text[:4000], self._separator)
        if len(cells) < len(self._names) or (self._separator is not None and len(cells) > len(self._names)):
            return None
        pairs = []
        for name, cell in zip(self._names, cells, strict=False):
            if name is None:
                continue
            counted = _COUNTED.fullmatch(cell)
            value = number(counted[1] if counted is not None else cell.strip(b":[],"))
            if value is None and name.role == "epoch":
                return [] if sum(number(other) is not None for other in cells) > 2 else None  # YOLO's row of all classes
            if value is None and name.role in METRICS and cell not in (b"", b"-", b"No", b"None"):
                return None
            pairs += [(name, value)] if value is not None else []
        return pairs if any(found.role in METRICS for found, _ in pairs) else None


def _cells(text: bytes, separator: bytes) -> list[bytes]:
    return [cell.strip() for cell in text.strip().strip(b"|").split(separator)]
