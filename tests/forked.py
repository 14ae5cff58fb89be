"""Processes of their own, forked from one that has imported torch and computed nothing: they begin in a tenth of a second, where
Python with torch and the first step of an optimizer takes four. For tests that need another process; those about how a program
starts, and what it imports, start a real one."""

from __future__ import annotations

import atexit
import builtins
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

from zoo.two_ranks import forking


def python(*words: Any, cwd: Path | None = None, env: dict[str, str] | None = None, before: str = "", timeout: float = 120):
    """As `python words...`, with what it printed. The path of modules is that of the caller; `before` is run first."""
    (done,) = _all([env or {**os.environ}], words, cwd, before, timeout)
    return done


def two_ranks_of(*words: Any, cwd: Path | None = None, timeout: float = 120):
    """As `torchrun --nproc-per-node 2 words...`, without the process that looks after the ranks: what each of them came to."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return _all([{**os.environ, **meet, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"], words, cwd, "", timeout)


def _all(environments: list[dict[str, str]], words: tuple[Any, ...], cwd: Path | None, before: str, timeout: float):
    """One process for each environment, all at once."""
    arguments = [*map(str, words)]
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder, str(i)) for i in range(len(environments))]
        started = []
        for place, environment in zip(places, environments, strict=True):
            place.mkdir()
            given = arguments, str(cwd or Path.cwd()), environment, before, str(place)
            started.append(forking().Process(target=_main, args=given))
            started[-1].start()
        until = time.monotonic() + timeout
        for process in started:
            process.join(max(0.0, until - time.monotonic()))
        late = [process for process in started if process.is_alive()]
        for process in late:
            process.kill()
            process.join()
        if late:
            raise subprocess.TimeoutExpired(arguments, timeout)
        return [
            subprocess.CompletedProcess(arguments, process.exitcode, (place / "1").read_text(), (place / "2").read_text())
            for place, process in zip(places, started, strict=True)
        ]


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
