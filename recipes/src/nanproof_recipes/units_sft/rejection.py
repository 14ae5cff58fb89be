"""Rejection sampling: the model answers many times, what is right is kept, and it goes on learning from that.

Half of the point is that no answer has to be written by hand: the questions are new, and the metric tells right from wrong.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from nanproof import UsageError
from nanproof_recipes.arms import check_least
from nanproof_recipes.library import write_whole
from nanproof_recipes.machine import nonfinite_tensors
from nanproof_recipes.units_sft.arms import Setting
from nanproof_recipes.units_sft.asking import replies
from nanproof_recipes.units_sft.data import questions
from nanproof_recipes.units_sft.data.questions import Question
from nanproof_recipes.units_sft.data.samples import Example, example, examples, prompt
from nanproof_recipes.units_sft.models import Language
from nanproof_recipes.units_sft.scoring import is_right, parse


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are drawn."""

    more: int = 2000
    """New questions to be answered; none of them is one to train on or to be tested with."""
    samples: int = 4
    temperature: float = 0.8
    keep: int = 1
    """Different right answers that are kept of one question."""

    def __post_init__(self) -> None:
        check_least(asdict(self), more=1, samples=1, keep=1)
        if not 0 < self.temperature < 10:
            raise UsageError(f"--temperature {self.temperature}: a number above 0 is needed, such as 0.8")


@dataclass(frozen=True, slots=True)
class Kept:
    """What sampling came to."""

    asked: int
    solved: int
    """Questions with a right answer among the samples."""
    pairs: list[tuple[Question, str]]

    def save(self, path: Path) -> None:
        """One JSON object a line: what sampling came to, then every answer that is kept."""
        lines = [{"asked": self.asked, "solved": self.solved}, *({**asdict(q), "reply": reply} for q, reply in self.pairs)]
        write_whole(path, "".join(json.dumps(line) + "\n" for line in lines))

    @classmethod
    def load(cls, path: Path) -> Kept:
        try:
            first, *rest = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
            pairs = [(Question(line["text"], line["amount"], line["of"], line["to"]), str(line["reply"])) for line in rest]
            return cls(int(first["asked"]), int(first["solved"]), pairs)
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} does not hold the answers that were kept ({error!r}). --again draws them anew") from error

    def __str__(self) -> str:
        return f"sampling: {self.solved} of {self.asked} questions have a right answer; {len(self.pairs)} answers are kept"


def new_questions(count: int, known: Sequence[Question], seed: int) -> list[Question]:
    """Questions that are none of those that are known."""
    seen = {q.key for q in known}
    found = [q for q in questions.make(0, 0, seed=seed + 20_000, more=count + len(seen))["more"] if q.key not in seen]
    return found[:count]


def sample(
    language: Language,
    asked: Sequence[Question],
    sampling: Sampling,
    *,
    seed: int,
    batch: int,
    tick: Any = lambda done, said: None,
) -> Kept:
    """Right answers of the model itself, at most `keep` different ones for each question. Its adapters are merged into it."""
    bad, tensors = nonfinite_tensors(language.model)
    if bad:
        raise UsageError(f"{bad} of {tensors} trainable tensors of this model are not finite: nothing can be sampled from it")
    model: Any = language.model.merge_and_unload()  # half of the operations
    torch.manual_seed(seed)
    said = replies(
        model,
        language,
        [prompt(language, q.text) for q in asked],
        batch=batch,
        samples=sampling.samples,
        temperature=sampling.temperature,
        tick=tick,
    )
    ended = [[r for r in dict.fromkeys(rs) if r.endswith("</answer>")] for rs in said]  # and says nothing more after it
    right = [[r for r in rs if is_right(parse(r), q.correct)] for q, rs in zip(asked, ended, strict=True)]
    pairs = [(q, r) for q, rs in zip(asked, right, strict=True) for r in rs[: sampling.keep]]
    return Kept(len(asked), sum(bool(rs) for rs in right), pairs)


def rows_of(language: Language, train: Sequence[Question], kept: Kept, setting: Setting) -> list[Example]:
    """The answers that were there from the beginning, and the model's own."""
    own = [example(language, prompt(language, q.text), reply) for q, reply in kept.pairs]
    return [*examples(language, train, setting), *own]
