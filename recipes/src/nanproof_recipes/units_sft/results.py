"""What one arm came to: written beside its model, and read again instead of training twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nanproof import Incident
from nanproof_recipes.results import FILE, Saved, few
from nanproof_recipes.units_sft.scoring import standard_error

__all__ = ["FILE", "Result"]


@dataclass(frozen=True, slots=True)
class Result(Saved):
    """The measured end of one arm."""

    NUMBERS: ClassVar[tuple[str, ...]] = ("loss", "valid_loss", "grad_norm")

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

    def lines(self) -> list[str]:
        """For a person."""
        told = [f"{self.name}: {self.ending}"]
        if self.tensors is not None:
            told.append(f"  logged loss {few(self.loss)}, held-out loss {few(self.valid_loss)}, grad_norm {few(self.grad_norm)}")
            bad = f"{self.nonfinite} of {self.tensors} trainable tensors not finite"
            told.append(f"  {bad}, {self.refused} attempts refused, {self.skipped} steps skipped, {self.seconds or 0:.1f} s")
        told += [f"  {Incident.from_json(dict(incident))}" for incident in self.incidents[:3]]
        error = f" (standard error {self.standard_error:.3f})" if self.questions else ""
        told.append(
            f"  accuracy {self.accuracy:.3f}{error}, answer rate {self.answer_rate:.3f} on {self.questions} held-out questions"
        )
        return told
