"""`nanproof demo` does what it says, in a small size."""

import json
import math
import sys

import pytest
from typer.testing import CliRunner

from nanproof import read_steps
from nanproof.cli import app
from nanproof.cli._demo import documents, train
from nanproof.watch._plot import FINE, Scale, curve, spark


@pytest.fixture(scope="module")
def text():
    """Read once: parsing the standard library takes longer than most tests."""
    return documents()


@pytest.fixture(scope="module")
def demo(text, tmp_path_factory):
    """The command in a small size: 32 characters of a document. Both runs are trained by the first call; later ones tell of the
    same runs in another way."""
    folder, runs = tmp_path_factory.mktemp("demo"), {}

    def once(text, steps, seed, run_dir, tick):
        if run_dir not in runs:
            runs[run_dir] = train(text, steps, seed, run_dir, tick)
        return runs[run_dir]

    def call(*words, charset="utf-8"):
        return CliRunner(charset=charset).invoke(app, ["demo", "--steps", "60", "--run-dir", str(folder), *words])

    with pytest.MonkeyPatch.context() as patch:
        module = sys.modules["nanproof.cli._demo"]
        patch.setattr(module, "LENGTH", 32)
        patch.setattr(module, "documents", lambda: text)
        patch.setattr(module, "train", once)
        yield call, folder


def test_the_unguarded_run_dies_and_the_guarded_one_lives(demo):
    call, folder = demo
    result = call("--json")
    assert result.exit_code == 0, result.output
    runs = json.loads(result.stdout.splitlines()[-1], parse_constant=lambda c: math.nan / 0)
    assert runs["unguarded"]["died_at"] is not None and runs["guarded"]["died_at"] is None
    assert runs["unguarded"]["weights_nonfinite"] == runs["unguarded"]["weights"]
    assert runs["guarded"]["weights_nonfinite"] == 0
    assert runs["guarded"]["accuracy"] > 0.2 > 0.05 > runs["unguarded"]["accuracy"]
    assert runs["guarded"]["incidents"] and {i["action"] for i in runs["guarded"]["incidents"]} == {"skipped"}
    assert len(list(read_steps(folder / "steps.jsonl"))) == 60


def test_the_picture_fits_the_terminal(demo, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = demo[0]()
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    for words in ("unguarded: loss", "guarded: loss", "nan since step", "refused by the guard", "nonfinite-loss, skipped"):
        assert words in result.stdout
    assert "\x1b[" not in result.stdout


def test_a_terminal_that_knows_only_ascii_gets_ascii(demo):
    """Of its own, not characters that are written out because the terminal does not know them."""
    said = demo[0](charset="ascii").stdout_bytes.decode("ascii")
    assert said.count("refused by the guard") == 1 and "\\u" not in said


def test_the_data_has_the_bug_and_is_the_same_each_time(text):
    assert len(text) > 500 and any(len(t) < 2 for t in text)
    assert text == documents()


def test_bad_options_are_refused_with_a_hint():
    result = CliRunner().invoke(app, ["demo", "--steps", "1"])
    assert result.exit_code == 2 and "60" in result.output


def test_curves_show_height_and_gaps():
    scale = Scale(0.0, 2.0, log=False)
    top, bottom = curve([0.0, 1.0, 2.0, float("nan")], 4, 2, scale, FINE)
    assert top[0] == " " and top[2] not in " ×" and top[3] == "×"
    assert bottom[0] != " " and bottom[3] == " "
    assert curve([], 3, 2, scale, FINE) == ["   ", "   "]
    assert [len(row) for row in curve([1.0], 10, 3, scale, FINE)] == [10, 10, 10]
    assert curve([0.0, 1.0, 2.0, float("nan")], 4, 1, scale, FINE) == [spark([0.0, 1.0, 2.0, float("nan")], 4, FINE)] == ["▁▅█×"]
