"""Finding: something that a log shows, where it began, what it likely comes from, and what to do next."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from nanproof.logs._curve import Place

SEVERITIES = ("failure", "warning", "note")
KINDS = {
    "nonfinite-weight": "Weights or optimizer state are NaN or Inf",
    "nonfinite-loss": "The loss is NaN or Inf",
    "nonfinite-gradient": "A gradient is NaN or Inf",
    "gradient-norm-overflow": "The norm of the gradients overflows",
    "loss-scale-collapse": "The loss scale cannot be lowered further",
    "generation": "Completions could not be sampled",
    "exception": "A step raised an exception",
    "no-learning": "Nothing is learned",
    "hidden-nan": "A NaN loss that is logged as 0.0",
    "nan": "The loss is NaN",
    "inf": "The loss is Inf",
    "nan-warnings": "The run's own code reports bad values",
    "scaler-skipping": "The loss scaler skips steps",
    "scale-collapse": "The loss scale has collapsed",
    "nan-gradient": "The gradient is NaN or Inf",
    "bad-probabilities": "Sampling was given invalid values",
    "device-assert": "A device-side assertion",
    "unscale-fp16": "GradScaler was given fp16 gradients",
    "no-targets": "There is nothing to learn from",
    "learning-rate-zero": "The learning rate is 0",
    "zero-gradient": "The gradient is 0",
    "divergence": "The loss rises and stays up",
    "eval-nan": "The evaluation loss is NaN or Inf",
    "exploding-gradient": "The gradient norm explodes",
    "out-of-memory": "Out of memory",
    "crash": "An error was raised",
    "plateau": "The loss does not move",
    "overfit": "The evaluation loss rises while the training loss falls",
    "spike": "A spike of the loss that went away",
}
"""Worst first, each with its headline. The first eight, and "spike" and "divergence", are also kinds of recorded incidents."""


ABOUT = {"nan": "is NaN", "inf": "is Inf", "divergence": "has diverged"}
"""The headlines of findings about one value, without its name."""


@dataclass(frozen=True, slots=True)
class Likely:
    """A cause that would explain a finding."""

    reason: str
    slug: str | None = None
    """In the catalogue (docs/causes.md), where it has an entry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What nanproof recorded about incidents that are the same trouble, while the run was training."""

    action: str
    """What was done, as in `Incident.action`."""
    count: int
    steps: str
    """The steps, in words."""
    cause: str | None
    """None: not diagnosed."""
    where: str
    source: str | None
    """File and line."""
    fix: str | None
    verified: bool
    """Whether the fix was tried on the step itself, and held."""
    bundle: str | None
    """A bundle that exists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What a log shows."""

    kind: str
    severity: str
    place: Place
    """Where it began, as exactly as the log allows."""
    said: str
    causes: tuple[Likely, ...] = ()
    commands: tuple[str, ...] = ()
    """What to run or to add next, the most useful first."""
    about: str = ""
    """What the log calls the value that it is about, where that is not the loss."""
    optimizer: str = ""
    """The optimizer that it is about, where a run of nanproof has several."""
    recorded: Recorded | None = None
    """Of an incident that nanproof recorded; None for what is inferred from the log."""

    @property
    def headline(self) -> str:
        said = KINDS[self.kind]
        if self.about and self.kind in ABOUT:
            said = f"{self.about} {ABOUT[self.kind]}"
        return f"Training was halted. {said}" if self.recorded is not None and self.recorded.action == "halted" else said

    @property
    def rank(self) -> tuple[int, int]:
        """For sorting: worst first."""
        return SEVERITIES.index(self.severity), list(KINDS).index(self.kind)

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "severity": self.severity,
            "step": self.place.step,
            "epoch": self.place.epoch,
            "line": self.place.line or None,
            "headline": self.headline,
            "said": self.said,
            "causes": [{"slug": cause.slug, "reason": cause.reason} for cause in self.causes],
            "commands": list(self.commands),
            "about": self.about or None,
            "optimizer": self.optimizer or None,
            "recorded": None if self.recorded is None else asdict(self.recorded),
        }


SCAN = "nanproof scan CHECKPOINTS    # which checkpoint is the last without NaN"
PROTECT = "protect(trainer)    # or: nanproof run train.py. Refuses the bad step, and says where it came from"
RUN = "nanproof run train.py    # refuses the bad step, and says where it came from"
SLOWER = "a tenth of the learning rate, or a longer warm-up    # the first thing to try"
OBSERVE = "nanproof run --observe train.py    # which layer grows, and when it will overflow"
CHECK = "nanproof check train:build    # the first step, looked at before training"
REPLAY = "nanproof replay {bundle} --entry train:build    # the bad step again, as the guard has recorded it"
REPORT = "nanproof report {run}    # the whole run as one page: what was refused, and what it came from"
UNFILTER = "TrainingArguments(logging_nan_inf_filter=False)    # so that the log shows NaN as NaN"
