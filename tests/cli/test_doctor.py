"""`nanproof doctor LOG...`, as a user runs it: what it prints where, and its exit status."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nanproof import Incident
from nanproof.cli import app

CORPUS = Path(__file__).parents[1] / "logs" / "corpus"
HEALTHY, BAD, WARNED = CORPUS / "healthy_torch.jsonl", CORPUS / "torch_nan_batch.jsonl", CORPUS / "nanogpt_overfit.log"


def run(*arguments, columns=120, **more):
    return CliRunner().invoke(app, ["doctor", *map(str, arguments)], env={"COLUMNS": str(columns), "TERM": "dumb"}, **more)


def test_the_exit_status_says_what_was_found(tmp_path):
    (tmp_path / "prose.log").write_text("Nothing of interest.\n")
    assert [run(p).exit_code for p in (HEALTHY, BAD, WARNED, tmp_path / "prose.log")] == [0, 1, 0, 2]
    assert run(HEALTHY, BAD).exit_code == 1
    assert run(HEALTHY, tmp_path / "prose.log").exit_code == 0, "a file without a log among others is no error"


def test_strict_counts_warnings_and_notes():
    assert [run(p, "--strict").exit_code for p in (HEALTHY, WARNED, CORPUS / "torch_spike.jsonl")] == [0, 1, 1]


def test_a_healthy_log_is_two_lines():
    text = run(HEALTHY).stdout
    assert len(text.splitlines()) == 2 and "no sign of trouble in 300 points, to step 299" in text


def test_an_unhealthy_log_says_when_what_why_and_what_next():
    text = run(BAD).stdout
    assert "failure: nan" in text and "First seen: step 37, line 38" in text
    assert "nonfinite-batch" in text and "nanproof scan CHECKPOINTS" in text
    rows = text.splitlines()
    assert "×" in text and any("\u2800" < c <= "\u28ff" for c in text)
    mark = next(row for row in rows if "^" in row)
    assert abs(mark.index("^") - next(row for row in rows if "×" in row).index("×")) <= 1, "the mark is where the crosses begin"


def test_a_hidden_nan_is_drawn_as_what_it_is():
    text = run(CORPUS / "hf_nan_sample.log").stdout
    assert "logged as exactly 0.0" in text and text.count("×") > 20


def test_many_logs_are_a_table_and_only_the_unhealthy_ones_in_full():
    text = run(HEALTHY, BAD, WARNED).stdout
    head = text.splitlines()[:4]
    assert head[0].split() == ["log", "format", "points", "found"]
    assert "healthy" in head[1] and "failure: nan, step 37" in head[2] and "warning: overfit" in head[3]
    assert "no sign of trouble" not in text and "First seen: step 37" in text


def test_a_table_says_where_there_is_too_little_to_judge(tmp_path):
    (tmp_path / "short.log").write_text("step 10 loss 2.5\nstep 20 loss 2.4\n")
    (row,) = [line for line in run(HEALTHY, tmp_path / "short.log").stdout.splitlines() if "short.log" in line]
    assert row.endswith("too few to judge")


def test_json_of_what_does_not_exist_is_an_object_too(tmp_path):
    done = run(tmp_path / "nothing.log", "--json")
    (log,) = json.loads(done.stdout)["logs"]
    assert done.exit_code == 2 and log["status"] == "unreadable" and "does not exist" in log["error"]


def test_an_empty_file_is_called_empty(tmp_path):
    (tmp_path / "empty.log").touch()
    assert "the file is empty" in run(tmp_path / "empty.log").stdout


@pytest.mark.parametrize("small", [True, False])
def test_the_state_of_a_trainer_is_told_to_protect_it(tmp_path, monkeypatch, small):
    from nanproof.logs.read import _documents

    if not small:
        monkeypatch.setattr(_documents, "SMALL", 200)  # read piece by piece
    history = [{"step": i, "loss": 2.5 if i < 20 else math.nan, "grad_norm": 0.5, "epoch": i / 10} for i in range(30)]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"best_metric": None, "log_history": history}, indent=2))
    assert "protect(trainer)" in run(tmp_path / "trainer_state.json").stdout


def test_json_is_one_object_on_standard_output():
    done = run(BAD, HEALTHY, "--json")
    bad, healthy = json.loads(done.stdout)["logs"]
    assert done.exit_code == 1 and done.stderr == ""
    assert (bad["status"], bad["points"], bad["last_step"], bad["format"]) == ("failure", 90, 89, "JSON lines")
    (finding,) = bad["findings"]
    assert (finding["kind"], finding["severity"], finding["step"], finding["line"]) == ("nan", "failure", 37, 38)
    assert finding["causes"][0]["slug"] == "nonfinite-batch" and finding["commands"] and finding["said"]
    assert (healthy["status"], healthy["findings"], healthy["error"]) == ("healthy", [], None)


def test_standard_input_is_a_log():
    done = run("-", input=BAD.read_bytes())
    assert done.exit_code == 1 and "First seen: step 37" in done.stdout


def test_what_does_not_exist_is_said_and_does_not_stop_the_others(tmp_path):
    alone = run(tmp_path / "nothing.log")
    assert alone.exit_code == 2 and alone.stdout == "" and "nothing.log does not exist" in alone.stderr
    among = run(tmp_path / "nothing.log", BAD, HEALTHY)
    assert among.exit_code == 1 and "nothing.log" in among.stdout and "First seen: step 37" in among.stdout
    assert run(tmp_path / "nothing.log", HEALTHY).exit_code == 2


def test_a_file_that_breaks_off_is_judged_as_far_as_it_goes(tmp_path):
    whole = gzip.compress(BAD.read_bytes())
    (tmp_path / "cut.jsonl.gz").write_bytes(whole[:-20])
    done = run(tmp_path / "cut.jsonl.gz", HEALTHY)
    assert done.exit_code == 1 and "failure: nan" in done.stdout and "no sign" not in done.stdout


@pytest.mark.parametrize("columns", [40, 120])
@pytest.mark.parametrize("name", ["hf_nan_sample.log", "report_warnings.log", "nanogpt_divergence.log", "trl_grpo_sampling.log"])
def test_nothing_is_wider_than_the_terminal(columns, name):
    """Only the path of the file may not be broken by a space."""
    text = run(CORPUS / name, columns=columns).stdout
    assert max(len(line) for line in text.splitlines()) <= columns
    assert "First seen" in re.sub(r"\s+", " ", text)


def plain(*arguments, **environment):
    """In a process of its own, for its standard output."""
    env = {**os.environ, "TERM": "xterm-256color", **environment}
    return subprocess.run([sys.executable, "-m", "nanproof", "doctor", *map(str, arguments)], capture_output=True, env=env)


def test_colours_are_for_terminals_only():
    for environment in ({"NO_COLOR": "1", "FORCE_COLOR": ""}, {}):
        done = plain(BAD, PYTHONIOENCODING="utf-8", **environment)
        assert done.returncode == 1 and b"\x1b" not in done.stdout


def test_a_console_that_knows_few_characters(tmp_path):
    """cp1252 has neither blocks nor the signs that logs are full of."""
    log = tmp_path / "train.log"
    log.write_text(
        "step 1 loss 2.0\nstep 2 loss 1.9\nstep 3 loss 1.8\n\u26a0 WARNING: NaN loss at step 4 \u2192 stop\n", encoding="utf-8"
    )
    done = plain(log, BAD, PYTHONIOENCODING="cp1252")
    text = done.stdout.decode("cp1252")
    assert done.returncode == 1 and b"Traceback" not in done.stderr
    assert "failure: nan" in text and "#" in text and "\u2588" not in text


def test_strings_of_a_log_cannot_steer_the_terminal(tmp_path):
    log = tmp_path / "train[bold].log"
    lines = [f"step {i} loss {2 - i / 10:.3f}" for i in range(10)]
    lines.append("RuntimeError: [red]\x1b[2J\x1b]0;owned\x07 \u202e:smile: CUDA out of memory. Tried to allocate 2 GiB")
    log.write_text("\n".join(lines) + "\n", encoding="utf-8")
    done = run(log)
    assert done.exit_code == 1 and "out-of-memory" in done.stdout
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", done.stdout)
    assert "train[bold].log" in done.stdout and "owned" not in done.stdout.splitlines()[0]


def test_torch_is_not_imported():
    code = (
        "import sys; from typer.testing import CliRunner; from nanproof.cli import app; "
        f"r = CliRunner().invoke(app, ['doctor', {str(BAD)!r}]); assert r.exit_code == 1, r.output; "
        "bad = [m for m in ('torch', 'numpy', 'transformers') if m in sys.modules]; assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "epoch=3.ckpt"])
def test_a_checkpoint_given_by_mistake_is_sent_to_scan(tmp_path, name):
    """It is no log: the command that reads checkpoints is named, with the file."""
    (tmp_path / name).write_bytes(b"\x80\x00\x00\x00\x00\x00\x00\x00{}" + bytes(range(256)))
    done = run(tmp_path / name, columns=400)
    assert done.exit_code == 2 and f"nanproof scan {tmp_path / name}" in done.stdout


def test_a_guarded_run_is_not_told_to_use_a_guard(tmp_path):
    """Its folder is in the commands as printed; the refused step is told as recorded, or without the records as refused."""
    text = run(CORPUS / "nanproof_refused", columns=400).stdout
    assert f"nanproof report {CORPUS / 'nanproof_refused'} " in text and "--entry" not in text, "its bundle is not there"
    assert "warning: nonfinite-loss, skipped" in text
    assert "nanproof run" not in text and "protect(" not in text
    shutil.copy(CORPUS / "nanproof_refused" / "steps.jsonl", tmp_path)
    text = run(tmp_path, columns=400).stdout
    assert "The guard has refused 1 step, which the weights have not seen." in text
    assert "nanproof run" not in text and "protect(" not in text


def test_a_bundle_that_is_there_is_named(tmp_path):
    """Where it is now: the run may have been moved since it was written."""
    folder = shutil.copytree(CORPUS / "nanproof_refused", tmp_path / "run")
    bundle = folder / "incidents" / "step-000030-nonfinite-loss"
    bundle.mkdir(parents=True)
    (bundle / "manifest.json").write_text("{}")
    text = (folder / "incidents.jsonl").read_text()
    (folder / "incidents.jsonl").write_text(json.dumps({**json.loads(text), "bundle": f"elsewhere/{bundle.name}"}) + "\n")
    (finding,) = json.loads(run(folder, "--json").stdout)["logs"][0]["findings"]
    assert finding["recorded"]["bundle"] == str(bundle)
    diagnosis = json.loads(text)["diagnosis"]
    assert {key: finding["recorded"][key] for key in ("cause", "source", "fix")} == {
        key: diagnosis[key] for key in ("cause", "source", "fix")
    }
    assert any(command.startswith(f"nanproof replay {bundle} --entry") for command in finding["commands"])


def test_a_run_that_failed_in_its_first_step_has_a_finding(tmp_path):
    """Its journal has no step, only an incident."""
    (tmp_path / "steps.jsonl").write_text('{"v":2,"kind":"opened","time":1.0,"about":{}}\n')
    incident = Incident(step=0, kind="exception", action="recorded", message="ValueError: bad")
    (tmp_path / "incidents.jsonl").write_text(json.dumps(incident.to_json()) + "\n")
    done = run(tmp_path, "--json")
    (log,) = json.loads(done.stdout)["logs"]
    assert done.exit_code == 1 and [(f["kind"], f["severity"]) for f in log["findings"]] == [("exception", "failure")]


def test_a_loss_that_megatron_left_out_is_not_called_finite(tmp_path):
    """A NaN loss is not printed there, only the norm."""
    line = " iteration {i}/ 8000 | learning rate: 6.680E-06 |{loss} loss scale: 1.0 | grad norm: {norm} |\n"
    rows = [
        line.format(i=i, loss=f" lm loss: {0.7 + i % 7 / 90:.6E} |" * (i < 30), norm=0.7 if i < 30 else "nan")
        for i in range(1, 60)
    ]
    (tmp_path / "train.log").write_text("".join(rows))
    text = run(tmp_path / "train.log", columns=400).stdout
    assert (
        "failure: nan" in text and "lm loss is NaN" in text and "no longer contains lm loss" in text and "is finite" not in text
    )


def test_a_loss_that_never_changes_is_drawn_in_a_line(tmp_path):
    """Four empty lines above a flat one say nothing."""
    (tmp_path / "train.log").write_text("".join(f"step {i}: loss 10.8259\n" for i in range(1, 60)))
    lines = run(tmp_path / "train.log", columns=80).stdout.splitlines()
    assert "plateau" in "".join(lines) and all(line.strip() for line in lines[:2])


def test_the_folder_of_a_run_that_version_1_wrote(tmp_path):
    """Its incidents are beside its steps, and are not taken for steps."""
    folder = shutil.copytree(Path(__file__).parents[1] / "version_1", tmp_path / "run")
    text = run(folder).stdout
    words = " ".join(text.split())
    assert (
        "(nanproof): 29 points, to step 19, " in words
        and "; 3 incidents, 3 refused, ended" in words
        and "First seen: step 4." in words
    )
    assert f"nanproof report {folder}" in text.replace("\n", "")
