"""`nanproof watch`: what it prints, how it ends, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest
from typer.testing import CliRunner

from nanproof.cli import app
from watch.made import guard_in, run, train

COMMAND = [sys.executable, "-m", "nanproof", "watch"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    run(folder / "one", 12)
    run(folder / "two", 30)
    return folder


def test_the_state_once(runs):
    result = CliRunner().invoke(app, ["watch", str(runs), "--once"])
    assert result.exit_code == 0
    assert [line.split()[:3] for line in result.stdout.splitlines()[1:3]] == [["two", "ended", "29"], ["one", "ended", "11"]]
    assert "two: step 7: nonfinite-loss, skipped" in result.stdout and "as at step 7, once more: step 20" in result.stdout


def test_the_state_as_json(runs):
    result = CliRunner().invoke(app, ["watch", str(runs / "one"), str(runs / "two"), "--json"])
    found = [json.loads(line, parse_constant=lambda c: pytest.fail(c)) for line in result.stdout.splitlines()]
    assert [(one["run"], one["state"], one["step"], one["counts"]["skipped"]) for one in found] == [
        (str(runs / "one"), "ended", 11, 1),
        (str(runs / "two"), "ended", 29, 2),
    ]
    assert [incident["step"] for incident in found[1]["incidents"]] == [7, 20]


def test_a_terminal_that_knows_only_its_own_letters_gets_ascii(runs):
    result = subprocess.run(
        [*COMMAND, str(runs), "--once"], env={**os.environ, "PYTHONIOENCODING": "cp1252", "PYTHONUTF8": "0"}, capture_output=True
    )
    assert result.returncode == 0 and result.stdout.isascii() and b"two" in result.stdout


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["nowhere", "--once"], "does not exist"),
        (["nowhere", "--json"], "does not exist"),
        (["setup.cfg"], "is a file"),
        (["nowhere", "--web", "--once"], "--web"),
        (["nowhere", "--every", "0"], "every"),
    ],
)
def test_what_is_wrong_is_said_and_ends_with_2(args, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "setup.cfg").write_text("")
    result = CliRunner().invoke(app, ["watch", *args])
    assert result.exit_code == 2 and words in result.output


def test_a_file_of_the_run_names_the_run(runs):
    result = CliRunner().invoke(app, ["watch", str(runs / "one" / "steps.jsonl"), "--json"])
    assert json.loads(result.stdout)["run"] == str(runs / "one")


@pytest.mark.skipif(os.name != "posix", reason="signals")
def started(command):
    """As from a terminal: whoever runs the tests in the background has Ctrl-C ignored, and children inherit that."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_quietly_and_the_run_goes_on(tmp_path):
    guard = guard_in(tmp_path / "run")
    train(guard, 0, 10)
    watcher = started([*COMMAND, str(tmp_path / "run")])
    assert watcher.stdout is not None
    assert watcher.stdout.readline().startswith("step 7: nonfinite-loss, skipped")
    watcher.stdout.readline()
    time.sleep(0.1)
    watcher.send_signal(signal.SIGINT)
    _, errors = watcher.communicate(timeout=10)
    assert watcher.returncode == 0 and errors == ""
    train(guard, 10, 12)
    guard.close()


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_the_page_from_the_printed_address_to_ctrl_c(runs):
    """As a browser does it: the address, then the page and its data with the token in a header."""
    server = started([*COMMAND, str(runs / "two"), "--web"])
    assert server.stdout is not None
    url, elsewhere = server.stdout.readline().strip(), server.stdout.readline()
    assert f"ssh -L {url.split(':')[2].split('/')[0]}:127.0.0.1:" in elsewhere
    address, _, token = url.partition("#token=")
    browser = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with browser.open(address, timeout=10) as page:
        assert b"<!doctype html>" in page.read()
    browser.addheaders = [("Authorization", f"Bearer {token}")]
    with browser.open(f"{address}data", timeout=10) as data:
        assert json.load(data)["name"] == "two"
    server.send_signal(signal.SIGINT)
    _, errors = server.communicate(timeout=10)
    assert server.returncode == 0 and errors == ""


def test_a_reader_that_leaves_ends_it_quietly(runs):
    """`nanproof watch run | head -1`."""
    watcher = started([*COMMAND, str(runs)])
    assert watcher.stdout is not None and watcher.stderr is not None
    watcher.stdout.close()
    assert watcher.wait(timeout=20) == 0
    assert watcher.stderr.read() == ""
    watcher.stderr.close()


def on_a_terminal(command, keys=b"", until=b"", **environment) -> tuple[int, bytes]:
    """What a command writes to a terminal of 80 by 24; `keys` are pressed once it has written `until`."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    env = {**os.environ, "TERM": "xterm", **environment}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
    os.close(theirs)
    written, pressed, end = b"", False, time.monotonic() + 30
    while time.monotonic() < end:
        try:
            written += os.read(ours, 65536)
        except OSError:  # the other side was closed
            break
        if keys and not pressed and until in written:
            os.write(ours, keys)
            pressed = True
    os.close(ours)
    return process.wait(timeout=10), written


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals")
def test_without_textual_the_command_to_install_it_is_named(runs):
    code = f"import sys; sys.modules['textual'] = None; from nanproof.cli import app; app(['watch', {str(runs)!r}])"
    status, written = on_a_terminal([sys.executable, "-c", code])
    assert status == 2
    assert b"pip install textual" in written and b"Traceback" not in written


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals")
@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "ctrl-c"])
def test_a_screen_on_a_terminal_of_few_letters_and_no_colours(key, runs):
    """A real terminal, as far as the program can tell. What it is sent is ASCII and has no colours; q ends it, and Ctrl-C."""
    pytest.importorskip("textual")
    environment = {"PYTHONIOENCODING": "latin-1", "NO_COLOR": "1"}
    status, written = on_a_terminal([*COMMAND, str(runs)], key, b"newest first", **environment)
    assert status == 0 and written.isascii()
    assert b"nonfinite-loss, skipped" in written and b"Traceback" not in written
    colours = [int(n) for code in re.findall(rb"\x1b\[([0-9;]*)m", written) for n in code.split(b";") if n]
    assert not [n for n in colours if 31 <= n <= 36 or 41 <= n <= 46 or 91 <= n <= 96]


def test_watching_imports_no_torch(runs):
    check = "assert not [m for m in ('torch', 'numpy', 'textual') if m in sys.modules]"
    code = f"import sys; from nanproof.cli import app; app(['watch', {str(runs)!r}, '--once'], standalone_mode=False); {check}"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
