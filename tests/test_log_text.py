"""Names of files and classes, and texts of errors, reach the log without anything that would steer a terminal."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import nanproof
from nanproof.cli import app
from nanproof.explain.bundle._shelf import Parcel, Shelf
from nanproof.integrations.script._summary import Guarded, Summary
from nanproof.recover.data._quarantine import FILE, Quarantine
from nanproof.recover.state._store import Store
from toys import batches, mse, net

EVIL = "\x1b[2J\x1b]0;owned\x07\u202e"
SOURCE = Path(nanproof.__file__).parent


@pytest.fixture
def logged():
    """What a handler of the user's writes, whole."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    logger = logging.getLogger("nanproof")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.DEBUG)
    yield lambda: stream.getvalue()
    logger.setLevel(level)
    logger.removeHandler(handler)


def clean(text: str) -> bool:
    return text != "" and all(line.isprintable() for line in text.split("\n"))


def test_the_name_of_a_folder(tmp_path, logged):
    folder = tmp_path / f"run{EVIL}"
    folder.mkdir()
    (folder / FILE).write_text("not JSON\n")
    Quarantine(folder / FILE)
    assert clean(logged()) and r"\x1b[2J" in logged()


def test_the_name_of_a_checkpoint(tmp_path, logged):
    folder = tmp_path / f"checkpoints{EVIL}"
    (folder / "step-00000004").mkdir(parents=True)
    (folder / "step-00000004" / "good.json").write_text("{")
    (folder / "step-00000004" / "manifest.json").write_text("{")
    model = net()
    with nanproof.Guard(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=mse, checkpoints=nanproof.Checkpoints(folder)
    ) as guard:
        guard.resume()
    assert clean(logged()) and "step-00000004" in logged()


def test_the_name_of_a_bundle_that_is_not_written(tmp_path, logged):
    (tmp_path / f"a{EVIL}").write_text("")
    shelf = Shelf(tmp_path / f"a{EVIL}" / "incidents", keep=1)
    shelf.put(Parcel("step-000001-spike", {}, {"incident.json": {}}, {}, 0))
    shelf.close()
    assert clean(logged()) and "was not written" in logged()


def test_the_name_of_a_class_and_the_text_of_an_error(logged):
    """An optimizer of somebody else's that raises."""

    def step(self, closure=None):
        raise RuntimeError(f"bad {EVIL}\nWARNING nanproof: all is well")

    Evil = type(f"Evil{EVIL}", (torch.optim.SGD,), {"step": step})
    model = net()
    guard = nanproof.Guard(model, Evil(model.parameters(), lr=0.1), loss_fn=mse)
    with pytest.raises(RuntimeError):
        guard.train_step(batches(1)[0])
    guard.close()
    logging.getLogger("nanproof").warning(
        "nanproof: %s raised %s", Evil.__name__, RuntimeError(f"bad {EVIL}\nWARNING all is well")
    )
    assert clean(logged()) and "\nWARNING all is well" not in logged() and "\n  WARNING all is well" in logged()


def test_a_traceback(logged):
    try:
        raise ValueError(EVIL)
    except ValueError:
        logging.getLogger("nanproof").exception("nanproof: it failed")
    assert clean(logged()) and "Traceback" in logged() and r"ValueError: \x1b" in logged()


def test_what_can_be_shown_is_not_touched(logged):
    """Handlers that group messages by their pattern still can."""
    records: list[logging.LogRecord] = []
    keep = logging.Handler()
    keep.emit = records.append  # type: ignore[method-assign]
    logger = logging.getLogger("nanproof")
    logger.addHandler(keep)
    try:
        logger.warning("nanproof: %s has %d steps, %s", "r\u00e4umlich", 3, Path("a/b"))
        logger.warning("nanproof: 100 % of them")
        logger.warning("nanproof: %s and %d", EVIL, 3)
        try:
            raise ValueError("plain")
        except ValueError:
            logger.exception("nanproof: it failed")
    finally:
        logger.removeHandler(keep)
    assert records[0].args == ("r\u00e4umlich", 3, Path("a/b")) and records[0].msg == "nanproof: %s has %d steps, %s"
    assert records[2].args == () and records[2].getMessage().endswith(" and 3")
    assert "nanproof: 100 % of them\n" in logged() and "ValueError: plain" in logged()


def test_every_module_logs_through_the_one_logger_that_has_the_filter():
    names = {name for path in SOURCE.rglob("*.py") for name in re.findall(r"getLogger\((.*?)\)", path.read_text())}
    assert names == {'"nanproof"'}


def test_the_root_logger_and_those_of_others_are_left_alone():
    code = (
        "import logging; before = list(logging.root.handlers), logging.root.level, list(logging.root.filters);"
        "import nanproof; assert before == (logging.root.handlers, logging.root.level, logging.root.filters);"
        "assert not logging.getLogger('nanproof').handlers and logging.getLogger('nanproof').level == 0;"
        "assert logging.getLogRecordFactory() is logging.LogRecord"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", [["report"], ["watch", "--once"], ["scan"], ["doctor"], ["replay", "--entry", "a:b"]])
def test_an_error_of_a_command_shows_no_escape_either(command, tmp_path):
    done = CliRunner().invoke(app, [*command, str(tmp_path / f"no{EVIL}")])
    assert done.exit_code == 2 and clean(done.stderr) and r"\x1b" in done.stderr


def test_the_summary_of_a_script_shows_no_escape():
    guarded = Guarded(
        name=f"Adam{EVIL}",
        model=f"Net{EVIL}",
        path="device",
        verdicts="on the device",
        guarded=True,
        steps=3,
        refused=0,
        overflows=0,
        incidents=(),
        forecasts=(),
        run_dir=Path(f"run{EVIL}"),
        own_seconds=0.1,
        trouble_seconds=0.0,
        span_seconds=1.0,
    )
    lines = Summary("train.py", 1.0, 0, None, False, (guarded,)).wrapped(100)
    assert lines and all(line.isprintable() for line in lines)


def test_who_holds_a_folder_is_shown_without_escapes(tmp_path):
    """The lock is a file like any other: a stranger may have written it."""
    (tmp_path / "lock").write_text(EVIL)
    code = (
        "import sys, fcntl; f = open(sys.argv[1], 'r+'); fcntl.lockf(f, fcntl.LOCK_EX)\n"
        "print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "lock")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        try:
            with pytest.raises(nanproof.UsageError) as raised:
                Store(tmp_path, 1, _Alone())
        finally:
            other.communicate("")
    assert str(raised.value).isprintable() and r"\x1b" in str(raised.value)


class _Alone:
    together, rank, world = False, 0, 1
