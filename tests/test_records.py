"""Records are plain data that survive a trip through strict JSON."""

import json
import math
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanproof.records import ABSENT, Diagnosis, Incident, StepRecord, decode, encode, line, read_steps

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
