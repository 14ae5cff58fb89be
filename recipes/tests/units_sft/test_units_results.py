"""A result comes back from its file as it was, to the last digit, and a damaged file is named."""

from __future__ import annotations

import json
import math

import pytest

from nanproof import Incident, UsageError
from nanproof_recipes.units_sft.results import FILE, Result

FULL = Result(
    name="broken",
    setting={"arm": "broken", "lr": 2e-4, "questions": {"train": 48}},
    ending="raised ValueError: <b>\nno",
    steps=6,
    loss=0.1 + 0.2,
    valid_loss=math.nan,
    grad_norm=math.inf,
    accuracy=1 / 3,
    answer_rate=0.5,
    questions=16,
    nonfinite=28,
    tensors=28,
    refused=1,
    seconds=1.25,
    notes=["one", "two"],
    curves={"step": [1.0, 5.0], "loss": [math.pi, None], "grad_norm": [-math.inf, math.nan]},
    samples=[{"question": "?", "said": "\x1b[31m"}],
    incidents=[Incident(step=0, kind="nonfinite-weight", action="healed", message="seen", remedy="x").to_json()],
)


def test_everything_comes_back_with_all_digits_and_every_nan(tmp_path):
    FULL.save(tmp_path)
    text = (tmp_path / FILE).read_text()
    json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not strict JSON"))
    back = Result.load(tmp_path)
    assert repr(back) == repr(FULL)
    assert back.loss == 0.30000000000000004 and math.isnan(back.valid_loss) and back.grad_norm == math.inf
    assert back.to_json() == FULL.to_json() and back.to_json()["v"] == 1


def test_what_a_result_does_not_have_stays_none(tmp_path):
    Result(name="unmodified", setting={}).save(tmp_path)
    back = Result.load(tmp_path)
    assert back.loss is back.valid_loss is back.grad_norm is back.tensors is back.seconds is None
    assert back.lines() == ["unmodified: finished", "  accuracy 0.000, answer rate 0.000 on 0 held-out questions"]


def test_the_lines_for_a_person():
    lines = FULL.lines()
    assert "logged loss 0.3, held-out loss nan, grad_norm inf" in lines[1]
    assert "28 of 28 trainable tensors not finite, 1 attempts refused, 0 steps skipped, 1.2 s" in lines[2]
    assert lines[3] == "  step 0: nonfinite-weight, healed. seen; healed: x"
    assert FULL.standard_error == pytest.approx(math.sqrt(1 / 3 * 2 / 3 / 16))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"name": "fixed"}',
        '{"name": "fixed", "setting": []}',
        '{"name": "fixed", "setting": {}, "loss": "much"}',
        '{"name": "fixed", "setting": {}, "curves": {"loss": 3}}',
        '{"name": "fixed", "setting": {}, "curves": [3]}',
        "\udcff",
    ],
)
def test_a_damaged_result_is_named(tmp_path, text):
    (tmp_path / FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(UsageError, match=r"result\.json is not a result of this recipe .*delete it, or choose another --out"):
        Result.load(tmp_path)


def test_a_result_that_is_not_there_is_said(tmp_path):
    with pytest.raises(UsageError, match=r"result\.json is not there"):
        Result.load(tmp_path)
