"""What one arm came to: written beside its model, and read again instead of training twice."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from nanproof.core.files import strict_json, write_whole
from nanproof.errors import UsageError
from nanproof.recipes.units_sft.scoring import standard_error
from nanproof.records import Incident, decode

FILE = "result.json"


@dataclass(frozen=True, slots=True)
class Result:
    """The measured end of one arm."""

    name: str
    setting: Mapping[str, Any]
    """All that decided it: a folder with another setting is another run."""
    ending: str = "finished"
    steps: int = 0
    loss: float | None = None
    """As logged last: a NaN may be shown as 0.0 there."""
    valid_loss: float | None = None
    """Measured on held-out answers after training."""
    grad_norm: float | None = None
    accuracy: float = 0.0
    answer_rate: float = 0.0
    questions: int = 0
    nonfinite: int | None = None
    """Trainable tensors with a value that is not finite, of `tensors`."""
    tensors: int | None = None
    refused: int = 0
    """Attempts at a step that the guard refused."""
    skipped: int = 0
    """Steps that were not taken in the end."""
    rolled_back: int = 0
    seconds: float | None = None
    notes: Sequence[str] = ()
    curves: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    samples: Sequence[Mapping[str, str]] = ()
    incidents: Sequence[Mapping[str, Any]] = ()

    @property
    def standard_error(self) -> float:
        """Of the accuracy, from the number of questions alone."""
        return standard_error(self.accuracy, self.questions)

    def to_json(self) -> dict[str, Any]:
        return {"v": 1, **{name: _out(value) for name, value in asdict(self).items()}}

    def save(self, folder: Path) -> None:
        write_whole(folder / FILE, strict_json(self.to_json()))

    def lines(self) -> list[str]:
        """For a person."""
        told = [f"{self.name}: {self.ending}"]
        if self.tensors is not None:
            told.append(
                f"  logged loss {_few(self.loss)}, held-out loss {_few(self.valid_loss)}, grad_norm {_few(self.grad_norm)}"
            )
            bad = f"{self.nonfinite} of {self.tensors} trainable tensors not finite"
            told.append(f"  {bad}, {self.refused} attempts refused, {self.skipped} steps skipped, {self.seconds or 0:.1f} s")
        told += [f"  {Incident.from_json(dict(incident))}" for incident in self.incidents[:3]]
        error = f" (standard error {self.standard_error:.3f})" if self.questions else ""
        told.append(
            f"  accuracy {self.accuracy:.3f}{error}, answer rate {self.answer_rate:.3f} on {self.questions} held-out questions"
        )
        return told

    @classmethod
    def load(cls, folder: Path) -> Result:
        path = folder / FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            known = {f.name for f in fields(cls)}
            found = {name: value for name, value in data.items() if name in known}
            for name in ("loss", "valid_loss", "grad_norm"):
                found[name] = None if found.get(name) is None else decode(found[name])
            found["curves"] = {k: [None if x is None else decode(x) for x in v] for k, v in found.get("curves", {}).items()}
            if not isinstance(found.get("setting"), dict):
                raise TypeError("it has no setting")
            return cls(**found)
        except FileNotFoundError:
            raise UsageError(f"{path} is not there: the run in {folder} is not done. Train it again, it goes on") from None
        except (ValueError, TypeError, AttributeError) as error:
            raise UsageError(f"{path} is not a result of this recipe ({error}): delete it, or choose another --out") from error


def _few(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _out(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)  # all digits: two runs are compared by them
    if isinstance(value, Mapping):
        return {str(key): _out(item) for key, item in value.items()}
    return [_out(item) for item in value] if isinstance(value, (list, tuple)) else value
