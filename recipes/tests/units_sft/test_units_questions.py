"""The questions of units-sft: exact truth, no question in two sets, answers that parse back to what is right."""

from __future__ import annotations

import json
import re
import time
from decimal import ROUND_HALF_EVEN, Context, Decimal
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanproof import UsageError
from nanproof_recipes.units_sft.data.questions import FORMS, PHRASES, Question, load, make, save, worked
from nanproof_recipes.units_sft.data.units import LEAST, MOST, UNITS, factor, pairs, written
from nanproof_recipes.units_sft.scoring import TOLERANCE, is_right, parse

NAMED = {unit.name: unit for unit in UNITS}


@pytest.mark.parametrize(
    ("of", "to", "count"),
    [
        ("mile", "meter", Fraction("1609.344")),
        ("mile", "foot", Fraction(5280)),
        ("yard", "inch", Fraction(36)),
        ("inch", "millimeter", Fraction("25.4")),
        ("knot", "meter per second", Fraction(1852, 3600)),
        ("knot", "kilometer per hour", Fraction("1.852")),
        ("mile per hour", "kilometer per hour", Fraction("1.609344")),
        ("pound", "gram", Fraction("453.59237")),
        ("pound", "ounce", Fraction(16)),
        ("stone", "pound", Fraction(14)),
        ("week", "hour", Fraction(168)),
        ("year", "day", Fraction(365)),
        ("byte", "bit", Fraction(8)),
        ("watt-hour", "joule", Fraction(3600)),
        ("kilocalorie", "kilojoule", Fraction("4.184")),
        ("acre", "square foot", Fraction(43560)),
        ("hectare", "square meter", Fraction(10000)),
    ],
)
def test_factors_are_those_of_the_definitions(of, to, count):
    """Looked up by hand, not taken from the table that is tested."""
    assert factor(NAMED[of], NAMED[to]) == count
    assert factor(NAMED[to], NAMED[of]) == 1 / count


def test_every_pair_is_of_one_family_and_of_a_size_that_people_ask_for():
    found = pairs()
    assert len(found) == len(set(found)) > 100
    assert all(a.family == b.family and a is not b and LEAST <= factor(a, b) <= MOST for a, b in found)
    assert {a.family for a, _ in found} == {unit.family for unit in UNITS}
    assert len(NAMED) == len(UNITS) == len({unit.plural for unit in UNITS}) == len({unit.symbol for unit in UNITS})


def test_no_question_is_in_two_sets_and_the_sets_are_as_large_as_asked():
    """The size of the recipe itself: 1000 to train on, 1000 to be asked, 2000 to be sampled."""
    sets = make(1000, 1000, more=2000)
    assert {name: len(found) for name, found in sets.items()} == {"train": 1000, "valid": 1000, "more": 2000}
    keys = [(Fraction(q.amount), q.of, q.to) for found in sets.values() for q in found]
    assert len(set(keys)) == 4000


def test_a_seed_makes_the_same_questions_and_another_seed_others():
    once, again, other = make(50, 50, seed=3), make(50, 50, seed=3), make(50, 50, seed=4)
    assert once == again
    assert {q.key for q in once["train"]} != {q.key for q in other["train"]}
    longer = make(100, 0, seed=3)["train"]
    assert once["train"] + once["valid"] == longer


def test_each_question_says_its_amount_and_both_units():
    for q in make(500, 0)["train"]:
        of, to = NAMED[q.of], NAMED[q.to]
        assert re.search(rf"(?<![\d.]){re.escape(q.amount)}(?![\d.]*\d)", q.text), q
        assert any(word in q.text for word in (of.name, of.plural, of.symbol)), q
        assert any(word in q.text for word in (to.plural, to.symbol)), q
        assert 0.1 <= q.correct <= 1e6
    one = [q for q in make(2000, 0)["train"] if q.amount == "1" and " 1 " in q.text and NAMED[q.of].symbol not in q.text.split()]
    assert one and all(f"1 {NAMED[q.of].plural}" not in q.text for q in one)
    assert len(PHRASES) == len(set(PHRASES))


def test_every_answer_parses_back_to_a_right_answer():
    """In each form, with the three digits of the recipe; this is the most that a model can reach."""
    for q in make(1000, 1000)["train"]:
        for form in FORMS:
            assert is_right(parse(q.answer(form)), q.correct), (q, q.answer(form))


def test_the_forms_of_an_answer():
    q = Question("Convert 47 meters to inches.", "47", "meter", "inch")
    assert q.answer("bare") == "<answer>1850</answer>"
    assert q.answer("factor") == "47 * 39.4 = <answer>1850</answer>"
    assert q.answer("worked") == "47 * 39.4 = 1580 + 276 = <answer>1850</answer>"
    assert q.answer("worked", 4) == "47 * 39.37 = 1575 + 275.6 = <answer>1850</answer>"
    half = Question("0.5 h = ? min", "0.5", "hour", "minute")
    assert half.answer("worked") == "0.5 * 60 = <answer>30</answer>"


AMOUNTS = st.one_of(
    st.integers(1, 2000).map(str), st.integers(1, 99).map(lambda tenths: format(Decimal(tenths) / 10, "f").removesuffix(".0"))
)


@settings(max_examples=200)
@given(amount=AMOUNTS, way=st.sampled_from(pairs()))
def test_the_sums_on_the_way_agree_with_the_product(amount, way):
    """What the model is taught to add up leads to an answer that counts as right."""
    times = written(factor(*way), 3)
    text = worked(amount, times, 3)
    assert text.startswith(f"{amount} * {times} = ") and text.endswith("= ")
    middle = text.removeprefix(f"{amount} * {times} = ").removesuffix(" = ")
    exact = Fraction(amount) * factor(*way)
    total = sum(Fraction(part) for part in middle.split(" + ")) if middle else Fraction(amount) * Fraction(times)
    assert abs(total - exact) < Fraction(TOLERANCE) / 4 * exact
    assert len(middle.split(" + ")) == max(1, sum(digit in "123456789" for digit in amount)) or not middle


@settings(max_examples=300)
@given(top=st.integers(1, 10**9), bottom=st.integers(1, 10**6), digits=st.integers(1, 8))
def test_written_is_the_nearest_number_of_so_many_digits(top, bottom, digits):
    """Against Decimal's own arithmetic with a context of that many digits."""
    text = written(Fraction(top, bottom), digits)
    oracle = Context(prec=digits, rounding=ROUND_HALF_EVEN).plus(Context(prec=60).divide(Decimal(top), Decimal(bottom)))
    assert Decimal(text) == oracle
    assert re.fullmatch(r"\d+(\.\d*[1-9])?", text), text
    assert float(text) == pytest.approx(top / bottom, rel=0.51 * 10.0 ** (1 - digits))


def test_written_at_the_edges():
    assert written(Fraction(0), 3) == "0"
    assert written(Fraction("999.6"), 3) == "1000" and written(Fraction("0.9996"), 3) == "1"
    assert written(Fraction(123456), 3) == "123000" and written(Fraction("0.0254"), 3) == "0.0254"


def test_questions_come_back_from_a_file_as_they_were(tmp_path):
    made = make(40, 0)["train"]
    save(tmp_path / "deep" / "train.jsonl", made)
    assert load(tmp_path / "deep" / "train.jsonl") == made
    lines = (tmp_path / "deep" / "train.jsonl").read_text().splitlines()
    assert [json.loads(line)["correct"] for line in lines] == [q.correct for q in made]


@pytest.mark.parametrize(
    "bad",
    [
        "{",
        "[]",
        "3",
        '{"text": "x", "amount": "1", "of": "mile"}',
        '{"text": "x", "amount": "one", "of": "mile", "to": "meter"}',
        '{"text": "x", "amount": "1/0", "of": "mile", "to": "meter"}',
        '{"text": "x", "amount": "1", "of": "furlong", "to": "meter"}',
        '{"text": "x", "amount": "1", "of": ["mile"], "to": "meter"}',
    ],
)
def test_a_damaged_line_is_named(tmp_path, bad):
    path = tmp_path / "train.jsonl"
    save(path, make(2, 0)["train"])
    path.write_text(path.read_text() + "\n" + bad + "\n")
    with pytest.raises(UsageError, match=r"train\.jsonl, line 4: not a question"):
        load(path)


def test_a_file_that_is_not_there_comes_with_the_command_that_makes_it(tmp_path):
    with pytest.raises(UsageError) as caught:
        load(tmp_path / "data" / "valid.jsonl")
    assert f"`nanproof recipe units-sft data --out {tmp_path}`" in str(caught.value)


def test_more_questions_than_there_are_are_refused_soon():
    """A million is far more than these units and amounts make; that is found out in seconds, not after 50 million tries."""
    with pytest.raises(UsageError, match=r"train=-1: a number of questions of 0 or more"):
        make(-1, 0)
    begun = time.process_time()
    with pytest.raises(UsageError, match=r"there are not 1000000 different questions .* ask for at most (\d+) in all") as caught:
        make(1_000_000, 0)
    assert time.process_time() - begun < 30
    assert int(re.search(r"at most (\d+)", str(caught.value))[1]) > 10_000
