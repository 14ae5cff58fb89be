"""`nanproof recipe`: every command says what it needs, and the whole recipe runs end to end on the tiny model."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from nanproof.cli import app
from nanproof_recipes.units_sft import comparing, workshop
from nanproof_recipes.units_sft.data.questions import load, make
from units_small import WORDS

pytestmark = pytest.mark.usefixtures("taught")


def run(*words, code=0):
    result = CliRunner().invoke(app, ["recipe", *map(str, words)])
    assert result.exit_code == code, result.output
    return result


def strict(text):
    return json.loads(text, parse_constant=lambda word: pytest.fail(f"{word} is not strict JSON"))


def test_every_command_has_help_and_none_of_it_imports_torch():
    commands = [["recipe"], ["recipe", "weights"], ["recipe", "units-sft"]]
    commands += [["recipe", "units-sft", name] for name in ("data", "train", "test", "rft", "compare")]
    code = (
        "import sys; from typer.testing import CliRunner as R; import nanproof.cli as c\n"
        f"for words in {commands!r}:\n"
        "    found = R().invoke(c.app, [*words, '--help'])\n"
        "    assert found.exit_code == 0 and 'Usage' in found.output, (words, found.output)\n"
        "bad = [m for m in ('torch', 'numpy', 'transformers', 'peft') if m in sys.modules]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_data_makes_both_sets_and_tells_as_json(tmp_path):
    told = strict(run("units-sft", "data", "--out", tmp_path, "--train", 20, "--valid", 10, "--seed", 4, "--json").stdout)
    made = make(20, 10, 4)
    assert told["questions"] == {"train": 20, "valid": 10}
    assert load(tmp_path / "data" / "train.jsonl") == made["train"] and told["train"] == str(tmp_path / "data" / "train.jsonl")
    assert load(tmp_path / "data" / "valid.jsonl") == made["valid"]
    assert told["conversions"] == len({(q.of, q.to) for q in [*made["train"], *made["valid"]]})
    shown = run("units-sft", "data", "--out", tmp_path, "--train", 20, "--valid", 10, "--seed", 4).stdout
    assert made["train"][0].answer("worked") in shown


def test_data_needs_no_framework(tmp_path):
    code = (
        "import sys; from typer.testing import CliRunner as R; import nanproof.cli as c\n"
        f"words = ['recipe', 'units-sft', 'data', '--out', {str(tmp_path)!r}, '--train', '5', '--valid', '5']\n"
        "found = R().invoke(c.app, words)\n"
        "assert found.exit_code == 0, found.output\n"
        "bad = [m for m in ('transformers', 'peft') if m in sys.modules]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", ["train", "test", "rft", "compare"])
def test_missing_weights_come_with_the_command_that_gets_them(tmp_path, monkeypatch, command):
    monkeypatch.setenv("NANPROOF_WEIGHTS", str(tmp_path / "none"))
    (tmp_path / "out" / "fixed" / "adapter").mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "out" / "fixed" / "adapter" / name).write_text("{}")
    if command == "train":
        shutil.rmtree(tmp_path / "out" / "fixed" / "adapter")
    found = run("units-sft", command, "--train", 4, "--valid", 2, "--out", tmp_path / "out", code=2)
    error, hint = found.stderr.splitlines()[-2:]
    assert error == f"error: SmolLM2-135M-Instruct.Q4_1.gguf is not in {tmp_path / 'none'}"
    assert hint.startswith("hint: `nanproof recipe weights` gets it") and found.stdout == ""


def test_what_is_not_installed_is_named_with_the_command(tmp_path, monkeypatch):
    import importlib.util

    real = importlib.util.find_spec
    gone = ("peft", "accelerate")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in gone else real(name, *more))
    found = run("units-sft", "train", "--model", "tiny", "--out", tmp_path, code=2)
    lines = [
        "error: this installation of nanproof-recipes is broken: peft, accelerate not found",
        "hint: Repair it: pip install nanproof-recipes",
    ]
    assert found.stderr.splitlines() == lines
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "--arm", "fxied"], "hint: Choose broken, patched, guarded or fixed"),
        (["train", "--epochs", 0], "error: --epochs 0: a number of at least 1 is needed"),
        (["train", "--arm", "broken", "--use-fp32-for-training"], "hint: Choose it with --arm fixed"),
        (["compare", "--form", "long"], "error: --form long is unknown"),
        (["compare", "--epochs", 0], "error: --epochs 0: a number of at least 1 is needed"),
        (["compare", "--seed", -1], "error: --seed -1: a whole number from 0 to 2**32 - 1 is needed"),
        (["rft", "--temperature", 0], "error: --temperature 0.0: a number above 0 is needed, such as 0.8"),
        (["test", "--arm", "rft"], "recipe units-sft rft --out"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_begun(tmp_path, words, said):
    found = run("units-sft", *words, "--model", "tiny", "--train", 4, "--valid", 2, "--out", tmp_path / "out", code=2)
    assert said in found.stderr and "Traceback" not in found.output
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_train_and_test_from_the_command_line(tmp_path):
    """`broken` ends with status 1, `fixed` with 0, and `test` gives the score of the training."""
    common = ["--model", "tiny", "--train", 8, "--valid", 4, "--out", tmp_path]
    broken = run("units-sft", "train", "--arm", "broken", "--batch", 4, "--epochs", 2, *common, code=1)
    assert "28 of 28 trainable tensors not finite" in broken.stdout
    fixed = run("units-sft", "train", "--use-fp32-for-training", "--epochs", 1, "--json", *common)
    told = strict(fixed.stdout)
    assert told["setting"]["precision"] == "fp32" and told["nonfinite"] == 0 and told["steps"] == 1
    assert strict(run("units-sft", "test", "--json", *common).stdout) == told
    assert "answer rate 0.000 on 4 held-out questions" in run("units-sft", "test", "--arm", "unmodified", *common).stdout
    again = run("units-sft", "train", "--epochs", 1, "--again", "--json", *common)
    assert strict(again.stdout)["setting"]["precision"] == "auto"


@pytest.fixture
def compared(units_comparison):
    return units_comparison.out, units_comparison.said


def test_compare_writes_a_table_and_a_page_and_every_check_holds(compared):
    out, found = compared
    told = strict((out / "comparison.json").read_text())
    assert found.exit_code == 0, found.output
    assert told["checks"] and all(check["holds"] for check in told["checks"])
    assert "DOES NOT HOLD" not in found.stdout and found.stdout.count("holds: ") == len(told["checks"])
    names = [arm["name"] for arm in told["arms"]]
    assert names[:2] == ["unmodified", "unmodified-3-shot"] and names[-1] == "rft" and len(set(names)) == 13
    assert (out / "comparison.md").read_text().count("\n| ") >= 13
    assert "<html" in (out / "comparison.html").read_text()
    for arm in told["arms"]:
        guarded = arm["name"].startswith(("guarded", "fixed"))
        assert (out / arm["name"] / "nanproof" / "report.html").exists() == guarded == (arm["run"] is not None), arm["name"]


def test_compare_a_second_time_trains_nothing(compared, monkeypatch):
    out, _ = compared
    before = (out / "comparison.json").read_text()
    monkeypatch.setattr(workshop, "train", lambda *args, **kwargs: pytest.fail("an arm was trained again"))
    monkeypatch.setattr(comparing, "sample", lambda *args, **kwargs: pytest.fail("answers were drawn again"))
    begun = time.process_time()
    found = run("units-sft", "compare", "--model", "tiny", *WORDS, "--out", out, "--json")
    assert time.process_time() - begun < 10
    assert strict(found.stdout.splitlines()[-1]) == strict(before) == strict((out / "comparison.json").read_text())


def test_a_claim_that_was_not_seen_ends_with_status_1(compared):
    out, _ = compared
    path = out / "patched-001" / "result.json"
    kept = path.read_text()
    try:
        path.write_text(json.dumps({**json.loads(kept), "nonfinite": 3}))
        found = run("units-sft", "compare", "--model", "tiny", *WORDS, "--out", out, code=1)
        assert found.stdout.count("DOES NOT HOLD: ") == 1 and "DOES NOT HOLD: patched-001" in found.stdout
    finally:
        path.write_text(kept)


def test_other_settings_in_the_folder_end_with_status_2(compared):
    out, _ = compared
    found = run("units-sft", "compare", "--model", "tiny", *WORDS, "--epochs", 2, "--out", out, code=2)
    assert "was made with other settings (epochs)" in found.stderr and "hint: `train --again` does it anew" in found.stderr
