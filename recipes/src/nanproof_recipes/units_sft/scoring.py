"""What counts as an answer, and as a right one."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from nanproof import UsageError

TOLERANCE = 0.05
_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|$)", re.DOTALL)


def parse(text: str) -> float | None:
    """The number in the first `<answer>…</answer>`; None where there is no tag, or no finite number in it. The closing tag may be
    missing where the text ends."""
    found = _TAGGED.search(text)
    if found is None:
        return None
    try:
        value = float(found[1].strip().replace(",", "").replace("_", "x"))
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def is_right(answer: float | None, correct: float) -> bool:
    """Both rounded to 3 places, and less than 5 % apart."""
    if answer is None:
        return False
    return abs(round(answer, 3) - round(correct, 3)) < TOLERANCE * abs(round(correct, 3))


def standard_error(share: float, count: int) -> float:
    """Of a share of so many."""
    return math.sqrt(share * (1 - share) / max(count, 1))


@dataclass(frozen=True, slots=True)
class Score:
    """How a model did on a set of questions."""

    questions: int
    right: int
    answered: int

    @property
    def accuracy(self) -> float:
        return self.right / self.questions

    @property
    def answer_rate(self) -> float:
        """The share of replies that parse to a number."""
        return self.answered / self.questions

    @property
    def standard_error(self) -> float:
        """Of the accuracy, from the number of questions alone."""
        return standard_error(self.accuracy, self.questions)


def score(replies: Sequence[str], correct: Sequence[float]) -> Score:
    """One reply for each correct value."""
    if len(replies) != len(correct) or not replies:
        raise UsageError(f"score: {len(replies)} replies for {len(correct)} questions; one for each is needed, and at least one")
    answers = [parse(reply) for reply in replies]
    right = sum(is_right(answer, c) for answer, c in zip(answers, correct, strict=True))
    return Score(len(replies), right, sum(answer is not None for answer in answers))
