"""The versions of other packages that the adapters are tested with. Other versions log one warning."""

from __future__ import annotations

import logging
from importlib.metadata import PackageNotFoundError, version

log = logging.getLogger("nanproof")

TESTED = {
    "transformers": ("5.10", "6"),
    "trl": ("1.10", "2"),
    "accelerate": ("1.10", "2"),
    "lightning": ("2.4", "3"),
    "pytorch-lightning": ("2.4", "3"),
    "deepspeed": ("0.19", "1"),
}
"""From this version on, and below that one."""

_said: set[str] = set()


def check_version(package: str) -> None:
    """Say once that a package is not of a version the adapter was tested with."""
    try:
        found = version(package)
    except PackageNotFoundError:
        return
    low, high = TESTED[package]
    if package not in _said and not _numbers(low) <= _numbers(found) < _numbers(high):
        _said.add(package)
        log.warning(
            "nanproof: %s %s is outside of what its adapter is tested with (%s and later, below %s): look twice at what it does",
            package, found, low, high,
        )  # fmt: skip


def _numbers(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
