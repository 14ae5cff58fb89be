"""How programs write a number, NaN and Inf included: one pattern and one parser for every reader of text."""

from __future__ import annotations

import math
import re

PLAIN = rb"[+-]?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?"
NONFINITE = rb"[+-]?(?:(?:[nN]a[nN]|NAN)(?:\(ind\)|\(snan\)|x{1,6})?|[iI]nf(?:inity)?|INF(?:INITY)?|1\.#(?:QNAN|SNAN|IND|INF)0*)"
"""C prints `-nan`, `nan(ind)` and `1.#QNAN`; a format without room for a NaN fills it up with x."""
ANY = rb"(?:" + NONFINITE + rb"|[+-]?\d{1,3}(?:,\d{3})+(?:\.\d+)?|" + PLAIN + rb"|[+-]?\.\d+(?:[eE][+-]?\d+)?)"


def parse(text: bytes) -> float:
    """Return the value of a match of `ANY`."""
    try:
        return float(text)
    except ValueError:
        low = text.lower()
        if b"inf" in low:
            return -math.inf if low.startswith(b"-") else math.inf
        return math.nan if b"n" in low else float(text.replace(b",", b""))


_TUPLE = re.compile(rb'"step": \[(\d{1,9}), (\d{1,15})(?:, \d{1,15})?\]|(?<= - )\((\d{1,9}), (\d{1,15})(?:, \d{1,15})?\) ')
"""The step of DLLogger: epoch, iteration and the iteration of a validation."""
_ESCAPES = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|\x08+|\x00+")


def plain(text: bytes) -> bytes:
    """Return a line without colours and other marks that a terminal does not show, and with DLLogger's step by name."""
    if text.startswith(b"DLL"):
        text = _TUPLE.sub(lambda step: b"epoch: %b, step: %b " % ((step[1], step[2]) if step[1] else (step[3], step[4])), text)
    return _ESCAPES.sub(b"", text) if b"\x1b" in text or b"\x08" in text or b"\x00" in text else text
