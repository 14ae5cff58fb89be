"""Records are plain data that survive a trip through strict JSON."""

import json
import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanproof import Diagnosis, Incident, StepRecord, read_steps
from nanproof import _wording as wording
from nanproof._records import ABSENT, alike, decode, encode, line

numbers = st.floats(width=32, allow_subnormal=False)


def same(a, b):
    return (a != a and b != b) or a == b or math.isclose(a, b, rel_tol=1e-5)


@given(numbers)
def test_any_number_survives_as_strict_json(x):
    text = json.dumps(encode(x), allow_nan=False)
    assert same(decode(json.loads(text)), x)


def step_record(**changes):
    values = {
        "step": 3,
        "loss": 0.5,
        "grad_norm": 1.25,
        "action": "stepped",
        "clip": 1.0,
        "lr": (1e-3,),
        "scale": None,
        "spike": False,
        "typical": (0.1, 17.7),
        "spread": (0.2, 0.3),
        "loss_size": 0.6,
        "weights_checked": False,
        "names": ("a", "b"),
        "norms": array("d", [1.0, ABSENT]),
    }
    return StepRecord(**{**values, **changes})


@given(
    loss=numbers,
    norm=numbers,
    norms=st.lists(st.floats(0, width=32, allow_subnormal=False) | st.just(ABSENT), min_size=2, max_size=2),
)
def test_a_step_record_survives(loss, norm, norms):
    record = step_record(loss=loss, grad_norm=norm, norms=array("d", norms))
    again = StepRecord.from_json(json.loads(line(record.to_json())), record.names)
    assert same(again.loss, record.loss) and same(again.grad_norm, record.grad_norm)
    assert all(same(a, b) for a, b in zip(again.norms, record.norms, strict=True))
    assert again.names == record.names


def test_an_absent_gradient_is_not_a_norm_of_zero():
    assert step_record().by_parameter == {"a": 1.0}


def test_an_incident_survives_with_its_diagnosis():
    incident = Incident(
        step=7,
        kind="nonfinite-gradient",
        action="skipped",
        loss=0.25,
        grad_norm=float("inf"),
        culprits=(("head.weight", float("nan")),),
        rank=1,
        micro_batch=2,
        message="the loss is finite",
        diagnosis=Diagnosis(cause="sqrt-at-zero", confidence=0.9, samples=(2,), evidence=("input of sqrt was 0",), verified=True),
    )
    again = Incident.from_json(json.loads(line(incident.to_json())))
    assert str(again) == str(incident)
    assert again.diagnosis == incident.diagnosis and again.culprits[0][0] == "head.weight"
    assert math.isnan(again.culprits[0][1]) and again.grad_norm == float("inf")


def test_kinds_and_actions_are_fixed():
    with pytest.raises(ValueError, match="unknown incident kind"):
        Incident(step=0, kind="odd", action="skipped")


def test_a_line_cut_short_by_a_kill_is_left_out(tmp_path):
    path = tmp_path / "steps.jsonl"
    whole = line({"v": 1, "kind": "header", "names": ["a", "b"]}) + line(step_record().to_json())
    path.write_text(whole + line(step_record(step=4).to_json())[:40])
    assert [r.step for r in read_steps(path)] == [3]


def bad(step, action="skipped", cause=None, kind="nonfinite-loss", **more):
    found = None if cause is None else Diagnosis(cause=cause, confidence=0.9)
    return Incident(step=step, kind=kind, action=action, diagnosis=found, **more)


@pytest.mark.parametrize(
    ("incidents", "groups"),
    [
        ([], []),
        ([bad(1, cause="a"), bad(2, same_as=1), bad(4), bad(5, same_as=1)], [([0, 1, 3], 0), ([2], 2)]),
        ([bad(1), bad(2), bad(3, culprits=(("a", 1.0),)), bad(4, "clipped")], [([0, 1], 0), ([2], 2), ([3], 3)]),
        ([bad(1, cause="a"), bad(2), bad(3, cause="a"), bad(4, cause="b")], [([0, 2], 0), ([1], 1), ([3], 3)]),
        ([bad(1, cause="a"), bad(2, "halted", same_as=1)], [([0], 0), ([1], 0)]),
        ([bad(1, cause="a"), bad(2, kind="spike", same_as=1)], [([0], 0), ([1], 1)]),
        ([bad(2, same_as=2), bad(3, same_as=9), bad(9, cause="a")], [([0], 0), ([1], 1), ([2], 2)]),
        ([bad(1, cause="a"), bad(2, same_as=1), bad(3, same_as=2)], [([0, 1, 2], 0)]),
        ([bad(1), bad(1, cause="a"), bad(2, same_as=1)], [([0], 0), ([1, 2], 1)]),
        ([bad(1, cause="a"), bad(1, cause="a"), bad(2, same_as=1)], [([0, 1, 2], 0)]),
        ([bad(1, cause="a"), bad(1, cause="b"), bad(2, same_as=1)], [([0], 0), ([1], 1), ([2], 2)]),
    ],
    ids=["none", "named", "not diagnosed", "diagnosed alike", "done otherwise", "another kind", "not earlier", "a chain",
         "the diagnosed one",
         "a step twice", "which of two is not known"],
)  # fmt: skip
def test_incidents_with_one_explanation_are_grouped(incidents, groups):
    """`same_as`, or the same diagnosis, or, where none was made, the same kind and culprits. Done otherwise, they are apart."""
    assert [(group.members, group.origin) for group in alike(incidents)] == groups


@pytest.mark.parametrize(("others", "said"), [
    ([], ""),
    ([40], "as at step 39, once more: step 40"),
    ([41, 42, 43, 50], "as at step 39, 4 more times: steps 41-43, 50"),
    (range(40, 80, 2), "as at step 39, 20 more times: steps 40, 42, 44, 46, 48, 50 to 78"),
])  # fmt: skip
def test_how_often_it_came_again(others, said):
    assert wording.repeated(bad(39, cause="a"), others) == wording.repeated(bad(60, same_as=39), others) == said


def test_incidents_that_were_not_diagnosed_are_counted_and_not_called_the_same():
    assert wording.repeated(bad(39), [41, 42]) == "2 more not diagnosed: steps 41-42"


def test_a_list_of_another_type_is_not_made_a_list():
    """A text is a sequence of letters: `tuple` would take it."""
    data = bad(1).to_json()
    assert Incident.from_json({**data, "undone": ["ab"]}).undone == ("ab",)
    with pytest.raises(ValueError, match="another kind"):
        Incident.from_json({**data, "undone": "ab"})


def test_text_of_a_record_steers_no_terminal():
    incident = Incident(step=1, kind="exception", action="recorded", message="boom \x1b[31mred")
    assert "\x1b" not in str(incident) and "boom" in str(incident)
