"""What the arms of all recipes share: a base of their settings, how one is found by name, and checks of options."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from nanproof import UsageError
from nanproof_recipes.library import printable

ARMS = ("broken", "patched", "guarded", "fixed")
Found = TypeVar("Found")


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseSetting:
    """A base of settings: an arm may have several variants."""

    arm: str
    variant: str = ""
    says: str
    """What is different in this arm, in one line."""

    @property
    def name(self) -> str:
        """The name of its row and its folder."""
        return f"{self.arm}-{self.variant}" if self.variant else self.arm

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def find(settings: Mapping[tuple[str, str], Found], arm: str, variant: str = "") -> Found:
    """Return the setting of an arm and a variant. The error names the known ones."""
    found = settings.get((arm, variant))
    if found is None:
        check_choice("arm", arm, ARMS)
        variants = ", ".join(v for a, v in settings if a == arm and v)
        raise UsageError(f"--arm {arm} has no variant {printable(variant)!r}: it has {variants or 'none'}")
    return found


def given(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the changes that are not None."""
    return {key: value for key, value in changes.items() if value is not None}


def check_choice(option: str, value: str, choices: Sequence[str]) -> None:
    """Raise UsageError if an option has none of these values."""
    if value not in choices:
        raise UsageError(f"--{option} {printable(value)} is unknown. Choose {', '.join(choices[:-1])} or {choices[-1]}")


def check_above(values: Mapping[str, float], *names: str) -> None:
    """Raise UsageError if one of these values is not a finite number above 0."""
    for name in names:
        if not 0 < values.get(name, 1) < math.inf:
            raise UsageError(f"--{name.replace('_', '-')} {values[name]}: a number above 0 is needed")


def check_least(values: Mapping[str, float], **least: float) -> None:
    """Raise UsageError if one of these values is not finite or below its least."""
    for name, low in least.items():
        if not low <= values.get(name, low) < math.inf:
            raise UsageError(f"--{name} {values[name]}: a number of at least {low:g} is needed")


def check_seed(seed: int, bits: int = 32) -> None:
    if not 0 <= seed < 2**bits:
        raise UsageError(f"--seed {seed}: a whole number from 0 to 2**{bits} - 1 is needed")
