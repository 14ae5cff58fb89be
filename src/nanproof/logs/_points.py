"""Point and Note: what a reader finds in a log, whatever wrote it. Readers yield them in the order of the file."""

from __future__ import annotations

from dataclasses import dataclass, field

METRICS = ("loss", "eval_loss", "grad_norm", "lr", "scale", "skipped")
"""Names of values that are understood. `scale` is the loss scale; `skipped` how many steps have been left out, as the log counts
them: in all, or since the last line (`Point.skipped_in_all`). Readers translate each framework's names; what has none
here is left out."""


@dataclass(frozen=True, slots=True)
class Point:
    """One logged step."""

    values: dict[str, float]
    """By the names in `METRICS`. NaN and Inf are values like others; what was not logged is not here."""
    step: float | None = None
    """As the log counts it; None if it does not."""
    epoch: float | None = None
    line: int = 0
    """Line or record of the file, from 1."""
    skipped_in_all: bool = True
    """Whether `skipped` counts from the start of the run."""
    settings: dict[str, float] = field(default_factory=dict)
    """What a log says of the run as a whole: "steps" (planned), "logging_steps", "lr" (the base), "warmup", "epochs"."""
    refused: bool = False
    """A guard of nanproof did not take this step: the weights have not seen it."""


@dataclass(frozen=True, slots=True)
class Note:
    """A line of words that matters: a warning, an error, a skipped step."""

    kind: str
    """One of `NOTES`."""
    text: str
    """The line, without colours and control characters, at most 300 characters."""
    line: int
    step: float | None = None


NOTES = (
    "overflow",  # a loss scaler left a step out
    "nan-warning",  # the run's own code says that a loss or a gradient is NaN or Inf
    "unscale-fp16",  # GradScaler refuses fp16 gradients
    "bad-probabilities",  # sampling was given NaN or Inf
    "device-assert",  # a CUDA assertion, often an index out of range
    "out-of-memory",
    "scale-at-minimum",  # the loss scale cannot fall any further
    "error",  # any other exception that ended the program
    "resumed",
)
