"""`nanproof report` as it is called: what it writes, where, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from nanproof.cli import app
from report import made


def call(*args):
    return CliRunner().invoke(app, ["report", *map(str, args)])


@pytest.fixture
def run(tmp_path):
    made.write_run(tmp_path / "run", 40, bad=(5,))
    return tmp_path / "run"


def test_the_page_goes_into_the_runs_folder(run):
    before = {path.name for path in run.iterdir()}
    result = call(run)
    assert result.exit_code == 0 and result.stdout == f"{run / 'report.html'}\n"
    assert {path.name for path in run.iterdir()} - before == {"report.html"}
    assert (run / "report.html").read_text(encoding="utf-8").startswith("<!doctype html>")
    assert call(run).exit_code == 0, "and again over itself"


def test_other_places_and_standard_output(run, tmp_path):
    assert call(run, "--out", tmp_path / "x.html").exit_code == 0 and (tmp_path / "x.html").is_file()
    assert call(run, "--out", "-").stdout.startswith("<!doctype html>")
    assert call(run, "--markdown").stdout.startswith("# run\n")
    result = call(run, "--markdown", "--out", tmp_path / "x.md")
    assert result.stdout == f"{tmp_path / 'x.md'}\n" and (tmp_path / "x.md").read_text().startswith("# run\n")


def test_the_output_folder_of_a_trainer(tmp_path):
    made.write_run(tmp_path / "out" / "nanproof", 40)
    assert call(tmp_path / "out").stdout == f"{tmp_path / 'out' / 'nanproof' / 'report.html'}\n"


def test_what_cannot_be_is_said(run, tmp_path):
    """Status 2, what was wrong, and what to do: no folder, no run, several of them, no place to write, no tokenizer."""
    made.write_run(tmp_path / "other", 3)
    (tmp_path / "empty").mkdir()
    for args, said in [
        ([tmp_path / "missing"], "does not exist"),
        ([tmp_path / "empty"], "steps.jsonl"),
        ([run / "steps.jsonl"], "is a file"),
        ([tmp_path], "holds 2 runs"),
        ([run, "--out", tmp_path / "missing" / "x.html"], "cannot be written"),
        ([run, "--out", tmp_path / "empty"], "cannot be written"),
        ([run, "--tokenizer", tmp_path / "empty"], "tokenizer.json"),
    ]:
        result = call(*args)
        assert result.exit_code == 2 and said in result.stderr and "hint: " in result.stderr, args
        assert "Traceback" not in result.output
    assert list((tmp_path / "empty").iterdir()) == [] and not (run / "report.html").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="file names are any bytes on Linux only")
def test_a_folder_of_any_name(tmp_path):
    """A name that is no text, or that would steer a terminal, is written escaped; the page is there all the same."""
    strange = tmp_path / os.fsdecode(b"run\xff\x1b[2J<b>")
    made.write_run(strange, 5)
    command = [sys.executable, "-m", "nanproof", "report", str(strange)]
    result = subprocess.run(command, capture_output=True, check=True, env=_paths())
    assert b"\\udcff\\x1b" in result.stdout and (strange / "report.html").is_file()
    made.write_run(tmp_path / "other", 5)
    result = subprocess.run([*command[:-1], str(tmp_path)], capture_output=True, env=_paths())
    assert result.returncode == 2 and b"\x1b" not in result.stderr and b"\\x1b[2J" in result.stderr


def test_torch_is_not_imported(run):
    check = "bad = [m for m in ('torch', 'numpy', 'transformers') if m in sys.modules]; assert not bad, bad"
    code = "import sys; from typer.testing import CliRunner; from nanproof.cli import app; "
    code += f"assert CliRunner().invoke(app, ['report', sys.argv[1]]).exit_code == 0; {check}"
    subprocess.run([sys.executable, "-c", code, str(run)], check=True)


def test_a_console_that_cannot_write_everything(run):
    """On a console of another code page the page goes out as UTF-8, which its head says."""
    lines = [json.dumps({"v": 1, "kind": "header", "names": ["\u2207 \u0645"]}) + "\n", made.step_line(0, norms=[1.0])]
    (run / "steps.jsonl").write_text("".join(lines))
    for args in (["--out", "-"], ["--markdown"]):
        command = [sys.executable, "-X", "utf8=0", "-m", "nanproof", "report", str(run), *args]
        result = subprocess.run(command, capture_output=True, check=True, env={"PYTHONIOENCODING": "cp1252", **_paths()})
        assert result.stdout.decode("utf-8")


def _paths():
    return {name: os.environ[name] for name in ("PATH", "PYTHONPATH", "SYSTEMROOT", "HOME") if name in os.environ}


def test_the_data_of_the_page_is_one_object_of_strict_json(run, tmp_path):
    """What the page embeds, on standard output or in a file; no page is written."""

    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    result = call(run, "--json")
    told = json.loads(result.stdout, parse_constant=no_constant)
    assert result.stdout.count("\n") == 1 and told["v"] == 1 and told["name"] == "run"
    assert told["curves"]["steps"] == list(range(40)) and [one["step"] for one in told["incidents"]] == [5]
    assert not (run / "report.html").exists()
    assert call(run, "--json", "--out", tmp_path / "x.json").stdout == f"{tmp_path / 'x.json'}\n"
    again = json.loads((tmp_path / "x.json").read_text())
    assert {**again, "made": ""} == {**told, "made": ""}
    wrong = call(run, "--json", "--markdown")
    assert wrong.exit_code == 2 and "hint: Leave out one of them" in wrong.stderr


@pytest.mark.parametrize("name", ["steps.jsonl", "incidents.jsonl", "incidents/step-000005-x/manifest.json"])
def test_a_report_is_never_written_over_what_the_run_wrote(run, name):
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).touch()
    before = (run / name).read_bytes()
    result = call(run, "--out", run / name)
    assert result.exit_code == 2 and "belongs to the run" in result.stderr and (run / name).read_bytes() == before


@pytest.mark.skipif(os.name != "posix", reason="links and pipes are as POSIX has them")
def test_a_link_is_followed_and_a_pipe_is_written_to(run, tmp_path):
    """Neither is replaced by a file: `--out /dev/null`, called by root, would leave the machine without it."""
    (tmp_path / "link.html").symlink_to(tmp_path / "there.html")
    assert call(run, "--out", tmp_path / "link.html").exit_code == 0
    assert (tmp_path / "link.html").is_symlink() and (tmp_path / "there.html").read_text().startswith("<!doctype html>")
    os.mkfifo(tmp_path / "pipe")
    with subprocess.Popen(["cat", tmp_path / "pipe"], stdout=subprocess.PIPE) as reader:
        assert call(run, "--markdown", "--out", tmp_path / "pipe").exit_code == 0
        assert reader.communicate(timeout=20)[0].startswith(b"# run\n")
    assert (tmp_path / "pipe").is_fifo()


def test_an_error_names_the_file_that_was_asked_for(run, tmp_path):
    """And not the one it would have been written as at first."""
    result = call(run, "--out", tmp_path / "missing" / "x.html")
    assert "partial" not in result.stderr and "hint: Name another file with --out" in result.stderr
