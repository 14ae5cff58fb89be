"""The command line as a whole: wrong calls, poor consoles, closed pipes, completion."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import nanproof
from nanproof.cli import app

COMMANDS = sorted(command.callback.__name__ for command in app.registered_commands)


def nanproof_(*arguments, **environment):
    """The real command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "nanproof", *arguments],
        capture_output=True,
        env={**os.environ, **environment},
        timeout=60,
    )


@pytest.mark.parametrize(
    ("call", "error", "hint"),
    [
        (["scna"], "No such command 'scna'", "did you mean `nanproof scan`?"),
        (["recipe", "latent-dln"], "No such command 'latent-dln'", "did you mean `nanproof recipe latent-dlm`?"),
        (["zzz"], "No such command 'zzz'", "`nanproof --help` shows what it takes"),
        (["scan"], "Missing argument 'PATH'", "`nanproof scan --help` shows what it takes"),
        (["demo", "--steps", "3"], "Invalid value for '--steps'", "`nanproof demo --help` shows what it takes"),
        (["scan", "--nonsense", "x"], "No such option", "`nanproof scan --help` shows what it takes"),
    ],
)
def test_a_wrong_call_is_an_error_with_a_hint(call, error, hint):
    result = CliRunner().invoke(app, call, prog_name="nanproof")
    assert result.exit_code == 2 and result.stdout == ""
    first, second = result.stderr.splitlines()
    assert first.startswith(f"error: {error}") and second == f"hint: {hint}"


def test_without_a_command_the_help_is_shown():
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2 and "Commands:" in result.output


def test_the_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0 and result.stdout == f"nanproof {nanproof.__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_what_it_does_and_how_it_exits(command):
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "40"})
    assert result.exit_code == 0 and result.stdout.isascii()
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_a_console_that_knows_few_characters_ends_no_command(tmp_path):
    """As on Windows: cp1252 has no block characters, and file names may be anything."""
    bad = tmp_path / "Ωμέγα.safetensors"
    bad.write_bytes(b"")
    found = CliRunner(charset="cp1252").invoke(app, ["scan", str(bad)])
    assert found.exit_code == 2 and b"Traceback" not in found.stderr_bytes
    assert rb"\u03a9" in found.stdout_bytes + found.stderr_bytes


def test_a_closed_pipe_is_no_error():
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run([sys.executable, "-m", "nanproof", "--help"], stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert process.stderr == b""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_completion_for_every_shell(shell, monkeypatch):
    """The shell is named here: the one that runs the tests, if any, is no matter."""
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    result = CliRunner().invoke(app, ["--show-completion", shell], prog_name="nanproof")
    assert result.exit_code == 0 and "_NANPROOF_COMPLETE" in result.stdout


def test_completion_completes():
    done = nanproof_(_NANPROOF_COMPLETE="complete_bash", COMP_WORDS="nanproof sc", COMP_CWORD="1")
    assert "scan" in done.stdout.decode().split()


def test_recipes_of_another_version_are_said_in_one_line(monkeypatch):
    """They use private parts of the library: where the two do not fit, an import fails."""
    from nanproof.cli import _recipe

    class Misfit:
        def load(self):
            raise ImportError("cannot import name 'x'")

    _recipe._commands.cache_clear()
    monkeypatch.setattr(_recipe, "entry_points", lambda **_: [Misfit()])
    done = CliRunner().invoke(app, ["recipe", "latent-dlm"])
    _recipe._commands.cache_clear()
    assert done.exit_code == 2 and len(done.stderr.splitlines()) == 1
    assert f"pip install nanproof-recipes=={nanproof.__version__}" in done.stderr
