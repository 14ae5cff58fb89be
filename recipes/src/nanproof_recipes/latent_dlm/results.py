"""The result of one arm of latent-dlm, measured on held-out windows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from nanproof_recipes.results import BaseResult, few, gibibytes

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
class Result(BaseResult):
    """The measured end of one arm."""

    NUMBERS: ClassVar[tuple[str, ...]] = (*MEASURES, "grad_norm")

    tokens_per_second: float | None = None
    """Text and latents that went through the model in that time, in all processes."""
    text_loss: float | None = None
    """This and the next five: on held-out windows at the end, see `evaluating.Measured`."""
    text_accuracy: float | None = None
    latent_loss: float | None = None
    text_loss_given_latent: float | None = None
    text_accuracy_given_latent: float | None = None
    latent_loss_given_text: float | None = None
    infinite: int | None = None
    """Without a guard: the first step at which the norm of the gradients was Inf."""
    lost: int | None = None
    """Without a guard: the step since which no loss was finite."""
    memory: int | None = None
    """Bytes that torch took of the device at most; None on a CPU."""

    def measure_lines(self) -> list[str]:
        speed = f"{self.tokens_per_second or 0:,.0f} tokens/s{gibibytes(self.memory)}"
        return [
            *measured_lines({name: getattr(self, name) for name in MEASURES}),
            f"  {self.nonfinite} of {self.tensors} parameters not finite, grad_norm {few(self.grad_norm)}, "
            f"{self.skipped} steps skipped, {self.rolled_back} times rolled back",
            f"  {self.steps} steps in {self.seconds or 0:.1f} s, {speed}",
        ]


def measured_lines(found: Mapping[str, float | None]) -> list[str]:
    """The measures of `evaluating.Measured` for a person."""
    return [
        f"  held-out text loss {few(found['text_loss'])}, accuracy {few(found['text_accuracy'])}, "
        f"latent loss {few(found['latent_loss'])}",
        f"  given the latent: text loss {few(found['text_loss_given_latent'])}, "
        f"accuracy {few(found['text_accuracy_given_latent'])}; given the text: latent loss "
        f"{few(found['latent_loss_given_text'])}",
    ]
