"""Run a function in another process, under a limit on its time and on its memory.

    limits = Limits()                                  # or the fixture `limits` of tests/conftest.py
    outcome = limits.call("tests.scan.hostile:scanned", str(path), seconds=10, mebibytes=512)
    assert outcome.error == "" and outcome.value == ["bad"]

The process is kept from one call to the next, so that torch is imported once. A call that takes too long or too much memory ends
it, and the next call starts another. Memory is the growth of the peak resident size over what it was before the call.
"""

from __future__ import annotations

import atexit
import json
import os
import resource
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HARD = 3 << 30
"""Bytes over the start at which the system itself refuses memory, so that a failing test does not take the machine along."""


@dataclass(frozen=True)
class Outcome:
    value: Any = None
    error: str = ""
    """The exception that left the function, as `Type: text`; or "took more than ..." if it was ended."""
    seconds: float = 0.0
    mebibytes: float = 0.0


class Limits:
    """A process that calls functions by name."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def call(self, target: str, *args: Any, seconds: float = 10, mebibytes: float = 512) -> Outcome:
        """Call `module:function` with plain arguments; what it returns must be plain too."""
        self._ask("builtins:bool")  # starts the process, if there is none
        self._ask("importlib:import_module", target.partition(":")[0])  # imports are not counted
        return self._ask(target, *args, seconds=seconds, mebibytes=mebibytes)

    def _ask(self, target: str, *args: Any, seconds: float = 120, mebibytes: float = 4096) -> Outcome:
        if self._process is None:
            self._process = self._start()
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        reached: list[str] = []
        done = threading.Event()
        began = time.monotonic()
        base = _resident(process.pid)

        def watch() -> None:
            while not done.wait(0.02):
                if time.monotonic() - began > seconds:
                    reached.append(f"took more than {seconds} seconds")
                elif _resident(process.pid) - base > mebibytes:
                    reached.append(f"took more than {mebibytes} MiB")
                if reached:
                    process.kill()
                    return

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            process.stdin.write(json.dumps([target, args]) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        finally:
            done.set()
            watcher.join()
        if not answer or reached:
            code = self.close()
            why = reached[0] if reached else f"the process ended with {code}"
            return Outcome(error=why, seconds=time.monotonic() - began)
        value, error, took, peak = json.loads(answer)
        if peak > mebibytes:
            error = f"took {peak:.0f} MiB"
        return Outcome(value, error, took, peak)

    def close(self) -> int | None:
        if self._process is None:
            return None
        process, self._process = self._process, None
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
        return process.returncode

    def _start(self) -> subprocess.Popen[str]:
        atexit.register(self.close)
        paths = [str(ROOT), str(ROOT / "tests"), *sys.path]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-m", "limits"]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)


def _resident(pid: int | str, field: str = "RssAnon:") -> float:
    """Mebibytes that a process holds now, or held at most since the last reset (`VmHWM:`)."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(field):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    return 0.0


def main() -> None:
    """Answer calls from standard input. What a function prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_DATA, (HARD, resource.RLIM_INFINITY))
    for line in sys.stdin:
        target, args = json.loads(line)
        module, _, name = target.partition(":")
        value, error = None, ""
        base, began = 0.0, time.monotonic()
        try:
            function: Any = __import__(module, fromlist=[name])
            for part in name.split("."):
                function = getattr(function, part)
            Path("/proc/self/clear_refs").write_text("5")
            base, began = _resident("self", "VmHWM:"), time.monotonic()
            value = function(*args)
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"[:2000]
        took, peak = time.monotonic() - began, _resident("self", "VmHWM:") - base
        try:
            text = json.dumps([value, error, took, peak])
        except (TypeError, ValueError):
            text = json.dumps([repr(value)[:2000], error, took, peak])
        answers.write(text + "\n")


if __name__ == "__main__":
    main()
