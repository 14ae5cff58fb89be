"""`nanproof demo` does what it says, in a small size."""

import json
import math
import os
import subprocess
import sys

from typer.testing import CliRunner

from nanproof.cli import app
from nanproof.cli.demo import documents
from nanproof.records import read_steps
from nanproof.report.charts import curve


def test_the_unguarded_run_dies_and_the_guarded_one_lives(tmp_path):
    result = CliRunner().invoke(app, ["demo", "--steps", "60", "--json", "--run-dir", str(tmp_path)])
    assert result.exit_code == 0, result.output
    runs = json.loads(result.stdout.splitlines()[-1], parse_constant=lambda c: math.nan / 0)
    assert runs["unguarded"]["died_at"] is not None and runs["guarded"]["died_at"] is None
    assert runs["unguarded"]["weights_nonfinite"] == runs["unguarded"]["weights"]
    assert runs["guarded"]["weights_nonfinite"] == 0
    assert runs["guarded"]["accuracy"] > 0.2 > 0.05 > runs["unguarded"]["accuracy"]
    assert runs["guarded"]["incidents"] and {i["action"] for i in runs["guarded"]["incidents"]} == {"skipped"}
    assert len(list(read_steps(tmp_path / "steps.jsonl"))) == 60


def test_the_picture_fits_the_terminal(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    result = CliRunner().invoke(app, ["demo", "--steps", "60", "--run-dir", str(tmp_path)])
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    for words in ("unguarded: loss", "guarded: loss", "nan since step", "refused by the guard", "nonfinite-loss, skipped"):
        assert words in result.stdout
    assert "\x1b[" not in result.stdout


def test_a_terminal_that_knows_only_ascii_gets_ascii(tmp_path):
    command = [sys.executable, "-c", "from nanproof.cli import app; app()", "demo", "--steps", "60", "--run-dir", str(tmp_path)]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    result = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert result.stdout.decode("ascii").count("refused by the guard") == 1


def test_the_data_has_the_bug_and_is_the_same_each_time():
    text = documents()
    assert len(text) > 500 and any(len(t) < 2 for t in text)
    assert text == documents()


def test_bad_options_are_refused_with_a_hint():
    result = CliRunner().invoke(app, ["demo", "--steps", "1"])
    assert result.exit_code == 2 and "60" in result.output


def test_curves_show_height_and_gaps():
    rows = curve([0.0, 1.0, 2.0, float("nan")], 4, 2, 2.0, 0.0)
    assert rows == ["  █ ", "▁██×"] or rows[0][2] == "█"
    assert rows[-1][3] == "×" and rows[0][0] == " "
    assert curve([], 3, 2, 1.0, 0.0) == ["   ", "   "]
    assert [len(row) for row in curve([1.0], 10, 3, 1.0, 0.0)] == [10, 10, 10]
