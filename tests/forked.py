"""Processes of their own, forked from one that has imported torch and computed nothing: they begin in a tenth of a second, where
Python with torch and the first step of an optimizer takes four. For tests that need another process; those about how a program
starts, and what it imports, start a real one."""

from __future__ import annotations

import atexit
import builtins
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

from two_ranks import forking


def python(*words: Any, cwd: Path | None = None, env: dict[str, str] | None = None, before: str = "", timeout: float = 120):
    """As `python words...`, with what it printed. The path of modules is that of the caller; `before` is run first."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = [*map(str, words)], str(cwd or Path.cwd()), {**(env or os.environ)}, before, folder
        process = forking().Process(target=_main, args=arguments)
        process.start()
        process.join(timeout)
        if process.is_alive():
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired([*words], timeout)
        said, errors = ((Path(folder) / name).read_text() for name in ("1", "2"))
    return subprocess.CompletedProcess([*words], process.exitcode, said, errors)


def _main(words: list[str], cwd: str, env: dict[str, str], before: str, folder: str) -> None:
    for number in (1, 2):
        os.dup2(os.open(f"{folder}/{number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    status = 0
    try:
        os.environ.clear()
        os.environ.update(env)
        os.chdir(cwd)
        exec(before, {})
        _run(words)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
        if status and not isinstance(error.code, int):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


def _run(words: list[str]) -> None:
    while words[0] == "-W":
        action, _, category = words[1].partition("::")
        warnings.simplefilter(action, getattr(builtins, category or "Warning"))
        words = words[2:]
    first, *rest = words
    if first == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif first == "-m":
        sys.argv = [first, *rest[1:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")
