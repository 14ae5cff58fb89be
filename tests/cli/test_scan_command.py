"""`nanproof scan PATH...`, as a user runs it: what it prints where, and its exit status."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import zlib

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from nanproof.cli import app


def run(*arguments, columns=120):
    return CliRunner().invoke(app, ["scan", *map(str, arguments)], env={"COLUMNS": str(columns), "TERM": "dumb"})


@pytest.fixture
def clean(tmp_path):
    save_file({"layer.weight": torch.ones(2, 3), "ids": torch.arange(3)}, tmp_path / "clean.safetensors")
    return tmp_path / "clean.safetensors"


@pytest.fixture
def bad(tmp_path):
    tensors = {"layer.weight": torch.tensor([1.0, math.nan, -math.inf, -2.5]), "fine": torch.ones(2), "zero": torch.zeros(2)}
    save_file(tensors, tmp_path / "bad.safetensors")
    return tmp_path / "bad.safetensors"


@pytest.fixture
def broken(tmp_path):
    (tmp_path / "broken.pt").write_bytes(b"PK\x03\x04")
    return tmp_path / "broken.pt"


def test_the_exit_status_says_what_was_found(clean, bad, broken):
    """Bad numbers beat unreadable files: whoever waits for the one must not miss it for the other."""
    assert [run(p).exit_code for p in (clean, bad, broken)] == [0, 1, 2]
    assert run(clean, broken).exit_code == 2
    assert run(bad, broken, clean).exit_code == 1


def test_a_path_that_does_not_exist_is_an_error_on_standard_error(tmp_path):
    done = run(tmp_path / "nothing")
    assert done.exit_code == 2 and done.stdout == ""
    assert "nothing does not exist" in done.stderr and "hint: Give files" in done.stderr


def test_bad_and_suspicious_tensors_are_listed_and_others_only_with_all(bad):
    text = run(bad).stdout
    assert "bad: 1 of 3 tensors" in text and "GB/s" in text
    line = next(line for line in text.splitlines() if line.startswith("layer.weight"))
    assert "float32 4" in line and "1 NaN, 1 -Inf" in line and "-2.5 to 1" in line
    assert "all zeros" in text and "fine" not in text
    assert "fine" in run(bad, "--all").stdout


def test_names_are_printed_as_they_are(tmp_path):
    """Square brackets are no markup, and a narrow terminal loses nothing."""
    save_file({"[red]x[/red]:smile:": torch.tensor([math.nan])}, tmp_path / "[bold]w.safetensors")
    assert "[red]x[/red]:smile:" in run(tmp_path / "[bold]w.safetensors").stdout
    narrow = run(tmp_path / "[bold]w.safetensors", columns=40).stdout
    assert "1 NaN" in narrow and "[bold]w.safetensors: bad" in narrow


def test_names_cannot_steer_the_terminal(tmp_path):
    save_file({"w\x1b[2J\nlast good: all": torch.tensor([math.nan])}, tmp_path / "w.safetensors")
    text = run(tmp_path / "w.safetensors").stdout
    assert "\x1b" not in text and "w\\x1b[2J\\nlast good: all" in text


def test_many_checkpoints_are_one_line_each_and_the_last_good_is_named(tmp_path):
    for step in (5, 10, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
        save_file({"w": torch.tensor([math.inf if step == 20 else 1.0])}, tmp_path / f"checkpoint-{step}" / "m.safetensors")
    done = run(tmp_path, columns=200)
    assert done.exit_code == 1
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [(line[0], line[1]) for line in lines[1:4]] == [
        (str(tmp_path / f"checkpoint-{step}"), "bad" if step == 20 else "clean") for step in (5, 10, 20)
    ]
    assert done.stdout.splitlines()[-1] == f"last good: {tmp_path / 'checkpoint-10'}"


def test_json_is_one_strict_object(bad, broken):
    done = run(bad, broken, "--json", "--denormals")
    data = json.loads(done.stdout, parse_constant=lambda name: pytest.fail(name))
    assert (data["v"], data["status"], done.exit_code) == (1, "bad", 1)
    files = [file for checkpoint in data["checkpoints"] for file in checkpoint["files"]]
    assert [file["status"] for file in files] == ["bad", "unreadable"]
    tensor = next(t for t in files[0]["tensors"] if t["name"] == "layer.weight")
    assert (tensor["nan"], tensor["neginf"], tensor["min"], tensor["denormals"], tensor["bad"]) == (1, 1, -2.5, 0, True)


def test_checksums_are_printed_as_crc32_prints_them(clean):
    assert f"{zlib.crc32(clean.read_bytes()):08x}  {clean}" in run(clean, "--checksums").stdout


def test_the_help_names_every_option_and_exit_status():
    text = " ".join(run("--help").stdout.split())
    assert "Find NaN and Inf in checkpoints. Nothing in them is executed" in text
    assert "1 a NaN or an Inf was found, 2 none was found and some file could not be read or was refused, 0 all clean" in text
    assert all(option in text for option in ("--json", "--denormals", "--all", "--checksums"))


def test_it_runs_as_a_program(bad):
    done = subprocess.run(
        [sys.executable, "-m", "nanproof", "scan", str(bad)], capture_output=True, text=True, env={**os.environ, "COLUMNS": "100"}
    )
    assert done.returncode == 1 and "1 NaN" in done.stdout and done.stderr == ""
