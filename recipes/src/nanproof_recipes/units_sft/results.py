"""The result of one arm of units-sft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from nanproof_recipes.results import FILE, BaseResult, few
from nanproof_recipes.units_sft.scoring import standard_error

__all__ = ["FILE", "Result"]


@dataclass(frozen=True, slots=True)
class Result(BaseResult):
    """The measured end of one arm."""

    NUMBERS: ClassVar[tuple[str, ...]] = ("loss", "valid_loss", "grad_norm")

    loss: float | None = None
    """As logged last: a NaN may be shown as 0.0 there."""
    valid_loss: float | None = None
    """Measured on held-out answers after training."""
    accuracy: float = 0.0
    answer_rate: float = 0.0
    questions: int = 0
    refused: int = 0
    """Attempts at a step that the guard refused."""

    @property
    def standard_error(self) -> float:
        """The standard error of the accuracy, from the number of questions alone."""
        return standard_error(self.accuracy, self.questions)

    def lines(self) -> list[str]:
        """Return the result as lines for a person."""
        told = [f"{self.name}: {self.ending}"]
        if self.tensors is not None:
            told.append(f"  logged loss {few(self.loss)}, held-out loss {few(self.valid_loss)}, grad_norm {few(self.grad_norm)}")
            bad = f"{self.nonfinite} of {self.tensors} trainable tensors not finite"
            told.append(f"  {bad}, {self.refused} attempts refused, {self.skipped} steps skipped, {self.seconds or 0:.1f} s")
        error = f" (standard error {self.standard_error:.3f})" if self.questions else ""
        scored = f"  accuracy {self.accuracy:.3f}{error}, answer rate {self.answer_rate:.3f}"
        return [*told, *self.incident_lines(), f"{scored} on {self.questions} held-out questions"]
