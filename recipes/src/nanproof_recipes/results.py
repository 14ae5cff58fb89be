"""What the results of all recipes share: the measured end of an arm, stored as strict JSON beside its model and read instead of
training twice.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from nanproof import Incident, UsageError
from nanproof_recipes.folders import check, clear, refuse_another
from nanproof_recipes.library import decode, strict_json, write_whole

FILE = "result.json"
Own = TypeVar("Own", bound="BaseResult")


@dataclass(frozen=True, slots=True)
class BaseResult:
    """The measured end of one arm. Numbers that are not finite are strings in the file."""

    NUMBERS: ClassVar[tuple[str, ...]] = ("grad_norm",)
    """Fields that may be NaN or Inf."""

    name: str
    setting: Mapping[str, Any]
    """Everything that decided it: a folder with another setting is another run."""
    ending: str = "finished"
    steps: int = 0
    seconds: float | None = None
    """Training time."""
    grad_norm: float | None = None
    """The last that was logged."""
    nonfinite: int | None = None
    """Trainable tensors with a NaN or an Inf at the end, of `tensors`."""
    tensors: int | None = None
    skipped: int = 0
    """Steps that were not taken in the end."""
    rolled_back: int = 0
    notes: Sequence[str] = ()
    curves: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    samples: Sequence[Mapping[str, str]] = ()
    incidents: Sequence[Mapping[str, Any]] = ()

    def measure_lines(self) -> list[str]:
        """Return what was measured, for a person."""
        return []

    def incident_lines(self) -> list[str]:
        """Return the first incidents, for a person."""
        return [f"  {Incident.from_json(dict(incident))}" for incident in self.incidents[:3]]

    def lines(self) -> list[str]:
        """Return the result as lines for a person."""
        notes = [f"  {note}" for note in self.notes]
        return [f"{self.name}: {self.ending}", *self.measure_lines(), *self.incident_lines(), *notes]

    def to_json(self) -> dict[str, Any]:
        """Return all fields as strict JSON stores them, the long ones last."""
        made = asdict(self)
        names = sorted(made, key=("notes", "curves", "samples", "incidents").__contains__)
        return {"v": 1, **{name: plain(made[name]) for name in names}}

    def save(self, folder: Path) -> None:
        write_whole(folder / FILE, strict_json(self.to_json()))

    @classmethod
    def done(
        cls: type[Own],
        folder: Path,
        setting: Mapping[str, Any],
        keys: Iterable[str],
        again: bool = False,
        anew: str = "train --again",
    ) -> Own | None:
        """Return the result of an arm that is done, or None. An arm with another setting is refused; `again` removes it first,
        and `anew` is the command that does so."""
        if again:
            clear(folder, keys)
        if (folder / FILE).exists():
            found = cls.load(folder)
            refuse_another(folder, found.setting, setting, anew)
            return found
        check(folder, setting, anew)
        return None

    @classmethod
    def load(cls: type[Own], folder: Path) -> Own:
        path = folder / FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            known = {f.name for f in fields(cls)}
            found = {name: value for name, value in data.items() if name in known}
            for name in cls.NUMBERS:
                found[name] = None if found.get(name) is None else decode(found[name])
            found["curves"] = {k: [None if x is None else decode(x) for x in v] for k, v in found.get("curves", {}).items()}
            if not isinstance(found.get("setting"), dict):
                raise TypeError("it has no setting")
            return cls(**found)
        except FileNotFoundError:
            raise UsageError(f"{path} is not there: what is in {folder} is not done. Train it") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is not a result of this recipe ({error}): delete it, or choose another --out") from error


@dataclass
class BaseTrained:
    """A model after its training, and what is known about it."""

    model: Any
    setting: Any
    ending: str = "finished"
    steps: int = 0
    seconds: float = 0.0
    log: list[dict[str, Any]] = field(default_factory=list)
    """Lines as they were logged."""
    refused: int = 0
    """Attempts at a step that the guard refused; a step that was healed was run again."""
    skipped: int = 0
    """Steps that were not taken in the end."""
    rolled_back: int = 0
    incidents: list[Incident] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def last(self, name: str, count: int = 1) -> float | None:
        """Return the mean of the last logged values, or None."""
        found = [float(line[name]) for line in self.log if name in line][-count:]
        return sum(found) / len(found) if found else None

    def outcome(self) -> dict[str, Any]:
        """Return how it ended, as fields of a result."""
        names = ("ending", "steps", "seconds", "refused", "skipped", "rolled_back")
        return {**{name: getattr(self, name) for name in names}, "incidents": [one.to_json() for one in self.incidents]}


def few(value: float | None) -> str:
    """Return a number with four digits."""
    return "none" if value is None else f"{value:.4g}"


def gibibytes(memory: int | None) -> str:
    """Return device memory as the end of a line; nothing on a CPU."""
    return "" if memory is None else f", {memory / 2**30:.2f} GiB"


def plain(value: Any) -> Any:
    """Return a value as strict JSON stores it."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)  # all digits: two runs are compared by them
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value
