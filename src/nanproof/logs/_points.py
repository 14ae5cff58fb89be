"""Point, Batch and Note: what a reader finds in a log, whatever wrote it. Readers yield them in the order of the file."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

METRICS = ("loss", "eval_loss", "grad_norm", "lr", "scale", "skipped")
"""Names of values that are understood. `scale` is the loss scale; `skipped` how many steps have been skipped, as the log counts
them: in all, or since the last line (`Point.skipped_in_all`). Readers translate each framework's names; what has none
here is left out."""
SCORES = {
    **dict.fromkeys("acc ac accuracy top1 map map50 ndcg f1 bleu".split(), 0.0),
    **dict.fromkeys(("wer", "cer"), 1.0),
    "auc": 0.5,
}
"""Names of scores, with the worst value of each. A score may be NaN; one that never improves is a finding."""


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
    """What a log says of the run as a whole: "steps" (planned), "logging_steps", "lr" (the base), "warmup", "epochs";
    "rewards" and "rounds" are 1 in reinforcement learning and in boosting, "coarse_norm" where a norm is printed
    as 0.00. `Story` adds the framework of a `Sign`."""
    refused: bool = False
    """A guard of nanproof did not take this step: the weights have not seen it."""
    terms: dict[str, float] = field(default_factory=dict)
    """Other values of training, by their names in the log: parts of the loss, a critic's loss, a KL divergence."""
    names: Mapping[str, str] = field(default_factory=dict, compare=False)
    """What the log calls each of `values`."""
    loss_missing: bool = False
    """The line has no loss, where lines like it have one."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Points on consecutive lines with the same values, stored as columns. Reading them costs a tenth of single points."""

    columns: dict[str, list[float]]
    """By the names in `METRICS`."""
    terms: dict[str, list[float]]
    steps: list[float]
    epochs: list[float] | None
    line: int
    """Of the first."""
    like: Point
    """One of them: what is the same for all."""

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def last(self) -> Point:
        """The last of them."""
        *_, last = self._part(slice(len(self) - 1, None)).points()
        return last

    def halves(self) -> tuple[Batch, Batch]:
        """The first lines and the others."""
        at = len(self) // 2
        return self._part(slice(0, at)), self._part(slice(at, None))

    def _part(self, part: slice) -> Batch:
        return replace(
            self,
            columns={name: column[part] for name, column in self.columns.items()},
            terms={name: column[part] for name, column in self.terms.items()},
            steps=self.steps[part],
            epochs=None if self.epochs is None else self.epochs[part],
            line=self.line + part.start,
        )

    def points(self) -> Iterator[Point]:
        """The same, one at a time."""
        for i, step in enumerate(self.steps):
            yield replace(
                self.like,
                values={name: column[i] for name, column in self.columns.items()},
                terms={name: column[i] for name, column in self.terms.items()},
                step=step,
                epoch=None if self.epochs is None else self.epochs[i],
                line=self.line + i,
            )


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
    "bad-parameter",  # a distribution was given a parameter that is NaN or Inf
    "nonpositive-std",  # a normal distribution was given a standard deviation that is not positive, or NaN
    "device-assert",  # a CUDA assertion, often an index out of range
    "out-of-memory",
    "scale-at-minimum",  # the loss scale cannot fall any further
    "error",  # any other exception that ended the program
    "resumed",
)


@dataclass(frozen=True, slots=True)
class Sign:
    """Something that only one framework prints."""

    framework: str


Item = Point | Note | Batch | Sign
"""What a reader yields."""


def singly(items: Iterable[Item]) -> Iterator[Point | Note]:
    """Yield the points and notes, those of batches too."""
    for item in items:
        if isinstance(item, Sign):
            continue
        if isinstance(item, Batch):
            yield from item.points()
        else:
            yield item


def worst_score(name: str) -> float | None:
    """Return the worst value of a score, such as 0 for an accuracy; None if a name is not that of a score."""
    words = re.sub(r"[\W_]+", " ", name).lower().split()
    if "loss" in words:
        return None
    return next((SCORES[word] for word in words if word in SCORES), None)
