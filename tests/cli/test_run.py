"""`nanproof run` starts a script as Python does: arguments, paths, names, exit status, tracebacks."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

import forked
from nanproof.core.support._files import FolderLock

TELL = """
import json, sys
print(json.dumps({"name": __name__, "file": __file__, "argv": sys.argv, "path": sys.path[0], "torch": "torch" in sys.modules,
                  "main": sys.modules["__main__"].__dict__ is globals(), "spec": getattr(__spec__, "name", None)}))
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "tell.py").write_text(TELL)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "tell.py").write_text(TELL)
    return tmp_path


def run(*args, cwd, before=("-m", "nanproof", "run")):
    return subprocess.run([sys.executable, *before, *args], capture_output=True, text=True, cwd=cwd, timeout=60)


@pytest.mark.parametrize(
    "args",
    [
        ("scripts/tell.py", "--lr", "1e-3", "-m", "x", "--quiet", "--", "--json", "-"),
        ("-m", "package.tell", "--run-dir", "mine", "-m", "--policy"),
    ],
    ids=["script", "module"],
)
def test_a_script_sees_what_python_would_show_it(folder, args):
    """Arguments with dashes are the script's, even those that nanproof has too; torch is not imported for it."""
    oracle = run(*args, cwd=folder, before=())
    done = run("--quiet", *args, cwd=folder)
    assert done.returncode == 0 and done.stderr == ""
    assert json.loads(done.stdout) == json.loads(oracle.stdout)
    assert json.loads(done.stdout)["torch"] is False


def test_nothing_to_guard_is_said(folder):
    done = run("scripts/tell.py", cwd=folder)
    said = "nanproof: nothing was guarded: no optimizer of torch took a step after a backward"
    assert " ".join(done.stderr.split()) == said


@pytest.mark.parametrize(
    ("args", "status"),
    [
        (("-m", "no_such_module"), 1),
        (("scripts",), 1),
        (("scripts/wrong.py",), 1),
        (("scripts/crash.py",), 1),
        (("scripts/options.py", "--lr", "fast"), 2),
        (("scripts/options.py", "--quit"), 3),
    ],
    ids=["no module", "folder", "syntax", "crash", "argparse", "sys.exit"],
)
def test_a_script_that_fails_before_any_training_speaks_alone(folder, args, status):
    """The status is Python's, and there is no summary of nothing."""
    (folder / "scripts" / "wrong.py").write_text("def f(:")
    (folder / "scripts" / "crash.py").write_text("raise ValueError('no data')")
    (folder / "scripts" / "options.py").write_text(
        "import argparse, sys\n"
        "parser = argparse.ArgumentParser()\n"
        "parser.add_argument('--lr', type=float)\n"
        "parser.add_argument('--quit', action='store_true')\n"
        "parser.parse_args()\n"
        "sys.exit(3)\n"
    )
    oracle = run(*args, cwd=folder, before=())
    done = run(*args, cwd=folder)
    assert done.returncode == oracle.returncode == status
    last, expected = ((text.splitlines() or [""])[-1] for text in (done.stderr, oracle.stderr))
    assert last.split(": ")[-1].split(" in ")[0] == expected.split(": ")[-1].split(" in ")[0]
    assert "guarded" not in done.stderr and "runpy" not in done.stderr


def test_a_run_dir_that_cannot_be_written(folder):
    """The script is not started: it would train unprotected. Nor is it where another run writes."""
    (folder / "file").write_text("")
    done = run("--run-dir", "file/records", "scripts/tell.py", cwd=folder)
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert (
        "--run-dir file/records cannot be written" in done.stderr and "hint: Choose a folder that can be written" in done.stderr
    )
    lock = FolderLock(folder, "test")
    try:
        done = run("--run-dir", ".", "scripts/tell.py", cwd=folder)
    finally:
        lock.release()
    assert done.returncode == 2 and done.stdout == "" and "in use by another process" in done.stderr
    assert run("--run-dir", "deep/records", "scripts/tell.py", cwd=folder).returncode == 0


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit('what was wrong')", 1),
        ("def f():\n    raise ValueError('no')\nf()", 1),
        ("try:\n    1/0\nexcept ZeroDivisionError as e:\n    raise KeyError('x') from e", 1),
        ("def f(:", 1),
        ("import sys\nsys.excepthook = lambda *a: print('hooked', a[0].__name__)\nraise ValueError", 1),
        ("import atexit\natexit.register(print, 'bye')\nraise SystemExit(7)", 7),
    ],
)
def test_exit_status_and_traceback_are_pythons(tmp_path, code, status):
    """The same on stdout, on stderr, and to the shell."""
    (tmp_path / "script.py").write_text(code)
    oracle = run("script.py", cwd=tmp_path, before=())
    done = run("--quiet", "script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (oracle.returncode, oracle.stdout, oracle.stderr)
    assert done.returncode == status


def test_an_interrupt(tmp_path):
    (tmp_path / "script.py").write_text("raise KeyboardInterrupt")
    done = run("--quiet", "script.py", cwd=tmp_path)
    assert done.returncode == 130 and done.stderr.rstrip().endswith("KeyboardInterrupt")


def test_processes_of_the_script_are_its_own(tmp_path):
    """Spawned ones find its functions in `__main__`; a fork that comes back does not tell the summary again."""
    (tmp_path / "script.py").write_text(
        "import multiprocessing, os, sys\n"
        "def double(x):\n"
        "    return 2 * x\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print(pool.map(double, [1, 2]))\n"
        "    if os.fork() == 0:\n"
        "        sys.exit(5)\n"
        "    print(os.waitstatus_to_exitcode(os.wait()[1]))\n"
    )
    done = run("script.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[2, 4]\n5\n" and done.stderr.count("nanproof") == 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("gone.py",), "there is no file gone.py"),
        (("--policy", "nonsense=1", "x.py"), "no field of Policy"),
        (("--policy", "lag=-1", "x.py"), "Policy(lag=-1)"),
        (("--at-cap", "explode", "x.py"), "Policy(at_cap='explode')"),
        (("--optimizer", "best", "x.py"), "Choose auto, own or fused"),
    ],
)
def test_what_cannot_be_right(tmp_path, args, said):
    done = run(*args, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr


def test_policy_reaches_the_guard(tmp_path):
    """`--policy max_skip_rate=0 ...`: one refused step in a hundred is too many."""
    (tmp_path / "script.py").write_text(
        "import torch\n"
        "w = torch.ones(2, requires_grad=True)\n"
        "optimizer = torch.optim.SGD([w], 0.1)\n"
        "for i in range(5):\n"
        "    optimizer.zero_grad()\n"
        "    (w * (float('inf') if i == 2 else 1.0)).sum().backward()\n"
        "    optimizer.step()\n"
        "print(i, w.tolist())\n"
    )
    done = forked.python("-m", "nanproof", "run", "--json", "script.py", cwd=tmp_path)
    summary = json.loads(done.stderr.splitlines()[-1])
    assert done.returncode == 0 and summary["halted"] is None and summary["guarded"][0]["refused"] == 1
    words = ("--json", "--no-diagnose", "--policy", "max_skip_rate=0.0", "script.py")
    done = forked.python("-m", "nanproof", "run", *words, cwd=tmp_path)
    summary = json.loads(done.stderr.splitlines()[-1])
    assert done.returncode == 1 and done.stdout == "" and "max_skip_rate" in summary["halted"]
    assert summary["guarded"][0]["incidents"][0]["action"] == "halted"
    assert "nanproof: training was halted: " in done.stderr and "Traceback" not in done.stderr
