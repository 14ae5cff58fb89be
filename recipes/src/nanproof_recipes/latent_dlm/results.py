"""What one arm came to: measured on held-out windows, written beside its model, and read again instead of training twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from nanproof import Incident
from nanproof_recipes.results import Saved, few

MEASURES = (
    "text_loss",
    "text_accuracy",
    "latent_loss",
    "text_loss_given_latent",
    "text_accuracy_given_latent",
    "latent_loss_given_text",
)
"""The names of `evaluating.Measured`."""


@dataclass(frozen=True, slots=True)
class Result(Saved):
    """The measured end of one arm."""

    NUMBERS: ClassVar[tuple[str, ...]] = (*MEASURES, "grad_norm")

    name: str
    setting: Mapping[str, Any]
    """All that decided it: the arm, every key of its configuration, and the checksum of the data."""
    ending: str = "finished"
    steps: int = 0
    seconds: float | None = None
    """Of training, with its evaluations and checkpoints."""
    tokens_per_second: float | None = None
    """Text and latents that went through the model in that time, in all processes."""
    text_loss: float | None = None
    """This and the next five: on held-out windows at the end, see `evaluating.Measured`."""
    text_accuracy: float | None = None
    latent_loss: float | None = None
    text_loss_given_latent: float | None = None
    text_accuracy_given_latent: float | None = None
    latent_loss_given_text: float | None = None
    grad_norm: float | None = None
    """The last that was logged."""
    skipped: int = 0
    """Steps that were not taken."""
    rolled_back: int = 0
    infinite: int | None = None
    """Without a guard: the first step at which the norm of the gradients was Inf."""
    lost: int | None = None
    """Without a guard: the step since which no loss was finite."""
    nonfinite: int | None = None
    """Parameters with a value that is not finite at the end, of `tensors`."""
    tensors: int | None = None
    memory: int | None = None
    """Bytes that torch took of the device at most; None on a CPU."""
    notes: Sequence[str] = ()
    curves: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    samples: Sequence[Mapping[str, str]] = ()
    incidents: Sequence[Mapping[str, Any]] = ()

    def lines(self) -> list[str]:
        """For a person."""
        told = [f"{self.name}: {self.ending}"]
        told += measured_lines({name: getattr(self, name) for name in MEASURES})
        told.append(
            f"  {self.nonfinite} of {self.tensors} parameters not finite, grad_norm {few(self.grad_norm)}, "
            f"{self.skipped} steps skipped, {self.rolled_back} times rolled back"
        )
        memory = f", {self.memory / 2**30:.2f} GiB" if self.memory is not None else ""
        told.append(f"  {self.steps} steps in {self.seconds or 0:.1f} s, {self.tokens_per_second or 0:,.0f} tokens/s{memory}")
        told += [f"  {Incident.from_json(dict(incident))}" for incident in self.incidents[:3]]
        return told + [f"  {note}" for note in self.notes]


def measured_lines(found: Mapping[str, float | None]) -> list[str]:
    """The measures of `evaluating.Measured` for a person."""
    return [
        f"  held-out text loss {few(found['text_loss'])}, accuracy {few(found['text_accuracy'])}, "
        f"latent loss {few(found['latent_loss'])}",
        f"  given the latent: text loss {few(found['text_loss_given_latent'])}, "
        f"accuracy {few(found['text_accuracy_given_latent'])}; given the text: latent loss "
        f"{few(found['latent_loss_given_text'])}",
    ]
