"""Questions about unit conversions, with answers: two sets with no question in common, the same ones for the same seed.

A question is told from another by what it asks (amount, from, to), not by its words: "3 feet in inches" in two phrasings is one
question, and is in one set only.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from nanproof import UsageError
from nanproof_recipes.units_sft.data.units import UNITS, Unit, factor, pairs, written

Form = Literal["bare", "factor", "worked"]
FORMS: tuple[Form, ...] = ("bare", "factor", "worked")
"""How an answer is written: the number alone; the factor before it; every product and sum on the way."""

DIGITS = 3
"""Significant digits of factors and answers: an answer counts within 5 %, and every digit more is one more to get wrong."""

PHRASES = (
    "How many {to} are in {amount} {of}?",
    "How many {to} is {amount} {of}?",
    "Convert {amount} {of} to {to}.",
    "Convert {amount} {of_symbol} to {to_symbol}.",
    "What is {amount} {of} in {to}?",
    "What is {amount} {of_symbol} in {to_symbol}?",
    "Express {amount} {of} in {to}.",
    "I have {amount} {of}. How many {to} is that?",
    "{amount} {of} equals how many {to}?",
    "{amount} {of_symbol} = ? {to_symbol}",
    "Write {amount} {of} as a number of {to}.",
    "A recipe, a map or a form says {amount} {of}. What is it in {to}?",
    "Please turn {amount} {of} into {to}.",
    "If something measures {amount} {of}, how much is it in {to}?",
)
IN_VAIN = 2000
"""Tries one after the other that find nothing new; then there is hardly anything left to be found."""
_UNITS = {unit.name: unit for unit in UNITS}


@dataclass(frozen=True, slots=True)
class Question:
    """One question and the truth about it."""

    text: str
    amount: str
    """As it stands in the question."""
    of: str
    to: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What is asked, whatever the words."""
        return self.amount, self.of, self.to

    @property
    def exact(self) -> Fraction:
        return Fraction(self.amount) * self.factor

    @property
    def factor(self) -> Fraction:
        return factor(_UNITS[self.of], _UNITS[self.to])

    @property
    def correct(self) -> float:
        return float(self.exact)

    def answer(self, form: Form, digits: int = DIGITS) -> str:
        """What the model is to say."""
        tagged = f"<answer>{written(self.exact, digits)}</answer>"
        if form == "bare":
            return tagged
        times = written(self.factor, digits)
        if form == "factor":
            return f"{self.amount} * {times} = {tagged}"
        return f"{worked(self.amount, times, digits)}{tagged}"


def worked(amount: str, times: str, digits: int) -> str:
    """The product as it is done by hand: one digit of the amount at a time, then added up. 47 * 39.37 = 1575 + 275.6 ="""
    whole = f"{amount} * {times} = "
    parts = [part for part in _places(amount) if part]
    if len(parts) < 2:
        return whole
    products = [written(part * Fraction(times), digits) for part in parts]
    return whole + " + ".join(products) + " = "


def _places(amount: str) -> Iterator[Fraction]:
    """47 is 40 and 7; 2.5 is 2 and 0.5."""
    point = amount.find(".") if "." in amount else len(amount)
    for i, digit in enumerate(amount):
        if digit != ".":
            power = point - i - 1 if i < point else point - i
            yield int(digit) * Fraction(10) ** power


def make(train: int = 1000, valid: int = 1000, seed: int = 0, more: int = 0) -> dict[str, list[Question]]:
    """Sets "train" and "valid", and "more" of questions for sampling; none is in two of them."""
    for name, count in (("train", train), ("valid", valid), ("more", more)):
        if count < 0:
            raise UsageError(f"{name}={count}: a number of questions of 0 or more is needed")
    chance = random.Random(f"units {seed}")
    total, seen, found = train + valid + more, set[tuple[str, str, str]](), list[Question]()
    ways = pairs()
    in_vain = 0
    while len(found) < total:
        question = _one(chance, *chance.choice(ways))
        in_vain += 1
        if question.key not in seen and 0.1 <= question.correct <= 1e6:
            seen.add(question.key)
            found.append(question)
            in_vain = 0
        if in_vain > IN_VAIN:
            raise UsageError(f"there are not {total} different questions of this kind; ask for at most {len(found)} in all")
    return {"train": found[:train], "valid": found[train : train + valid], "more": found[train + valid :]}


def _one(chance: random.Random, of: Unit, to: Unit) -> Question:
    amount = _amount(chance)
    words = chance.choice(PHRASES).format(
        amount=amount, of=of.name if amount == "1" else of.plural, to=to.plural, of_symbol=of.symbol, to_symbol=to.symbol
    )
    return Question(words, amount, of.name, to.name)


def _amount(chance: random.Random) -> str:
    """Numbers as people ask them: small ones mostly, round ones, some with a half or a tenth."""
    kind = chance.random()
    if kind < 0.45:
        return str(chance.randint(1, 20))
    if kind < 0.70:
        return str(chance.randint(21, 99))
    if kind < 0.85:
        return str(chance.choice((25, 50, 100)) * chance.randint(2, 20))
    return written(Fraction(chance.randint(1, 99), 10), 2)


def save(path: Path, questions: Iterable[Question]) -> None:
    """One JSON object a line; whole or not there."""
    from nanproof_recipes.library import write_whole

    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "".join(json.dumps({**asdict(q), "correct": q.correct}) + "\n" for q in questions))


def save_sets(folder: Path, made: dict[str, list[Question]]) -> dict[str, Path]:
    """The two sets of `make`, each in its file."""
    paths = {name: folder / f"{name}.jsonl" for name in ("train", "valid")}
    for name, path in paths.items():
        save(path, made[name])
    return paths


def load(path: Path) -> list[Question]:
    """Back from a file of `save`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise UsageError(f"{path} is not there: `nanproof recipe units-sft data --out {path.parent.parent}` makes it") from None
    return [_read(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _read(path: Path, number: int, line: str) -> Question:
    try:
        fields: dict[str, Any] = json.loads(line)
        question = Question(fields["text"], str(fields["amount"]), fields["of"], fields["to"])
        _ = question.exact
    except (ValueError, KeyError, TypeError, ZeroDivisionError) as error:
        raise UsageError(
            f"{path}, line {number}: not a question with text, amount, of and to that this recipe knows ({error!r})"
        ) from None
    return question
