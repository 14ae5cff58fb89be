"""What counts as an answer, and as a right one, against the rule written out."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanproof import UsageError
from nanproof_recipes.units_sft.scoring import Score, is_right, parse, score


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("<answer>12.5</answer>", 12.5),
        ("47 * 2 = 94 = <answer> 94\n</answer> and so on", 94.0),
        ("<answer>1,000</answer>", 1000.0),
        ("<answer>1e3</answer>", 1000.0),
        ("<answer>-2</answer>", -2.0),
        ("<answer>7", 7.0),
        ("<answer>1</answer> <answer>2</answer>", 1.0),
        ("<answer>x</answer> <answer>2</answer>", None),
        ("<answer>1_000</answer>", None),
        ("<answer>nan</answer>", None),
        ("<answer>inf</answer>", None),
        ("<answer>-Infinity</answer>", None),
        ("<answer>1e999</answer>", None),
        ("<answer></answer>", None),
        ("<answer>", None),
        ("<answer>12 meters</answer>", None),
        ("12.5</answer>", None),
        ("12.5", None),
        ("", None),
    ],
)
def test_parsing(text, number):
    assert parse(text) == number


@settings(max_examples=300)
@given(answer=st.floats(-2e6, 2e6), correct=st.floats(-1e6, 1e6))
@example(answer=105.0, correct=100.0)
@example(answer=104.999, correct=100.0)
@example(answer=95.0, correct=100.0)
@example(answer=95.001, correct=100.0)
@example(answer=0.0, correct=0.0)
@example(answer=0.0004, correct=0.0004)
@example(answer=-100.0, correct=100.0)
@example(answer=0.0105, correct=0.01)
def test_right_is_less_than_five_percent_apart_after_rounding(answer, correct):
    assert is_right(answer, correct) == (abs(round(answer, 3) - round(correct, 3)) < 0.05 * abs(round(correct, 3)))


def test_right_at_the_edges():
    """Written out, so that the rule above is not only compared with itself."""
    assert is_right(104.999, 100.0) and not is_right(105.0, 100.0)
    assert is_right(95.001, 100.0) and not is_right(95.0, 100.0)
    assert is_right(0.1004, 0.1) and not is_right(0.1056, 0.1)
    assert not is_right(-100.0, 100.0) and not is_right(None, 100.0)
    assert not is_right(0.0, 0.0) and not is_right(math.nan, 1.0)


def test_a_score_counts_right_answers_and_parsed_ones():
    found = score(["<answer>10</answer>", "<answer>11</answer>", "ten", "<answer>nan</answer>"], [10.0, 10.0, 10.0, 10.0])
    assert found == Score(questions=4, right=1, answered=2)
    assert (found.accuracy, found.answer_rate) == (0.25, 0.5)
    assert found.standard_error == pytest.approx(math.sqrt(0.25 * 0.75 / 4))


@pytest.mark.parametrize(("replies", "correct"), [([], []), (["a"], []), (["a"], [1.0, 2.0])])
def test_one_reply_for_each_question_is_needed(replies, correct):
    with pytest.raises(UsageError, match=rf"{len(replies)} replies for {len(correct)} questions"):
        score(replies, correct)
