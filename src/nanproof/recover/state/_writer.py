"""Writer: write checkpoints in a separate process, so that training never waits for Python's lock.

torch plans and pickles a checkpoint in Python. In a thread, that takes a model of hundreds of small tensors the time of ten to
forty steps, as the thread and training take turns. Here the thread only sends a few kilobytes and waits. The tensors lie in
memory that both processes have.

The process is started with nothing of the user's: no `__main__`, no inherited files, no GPU. It may be killed at any moment.
Where there can be none, `ready` is False, and the thread writes.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from multiprocessing.spawn import get_executable
from pathlib import Path
from typing import Any, Protocol

import torch

import nanproof
from nanproof.core.support._files import reason
from nanproof.recover.state._apart import SIGNALS, Layout, identity
from nanproof.recover.state._pipe import Odd, plain_bytes, receive, send
from nanproof.recover.state._snapshots import Arena, Snapshot
from nanproof.recover.state._store import NotWritten, Store

log = logging.getLogger("nanproof")

_DEATHS = 3
"""How often the process may die before the thread takes over for good."""
_LONGEST_START = 300.0
"""Seconds. Importing torch can be slow from a network file system that many processes read."""


class Gone(Exception):
    """The process has ended in the middle of its work."""


class Process(Protocol):
    """The part of `subprocess.Popen` that is used."""

    pid: int

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self, timeout: float | None = None) -> int: ...


def launch(channel: socket.socket, folder: Path, keep: int) -> Process:
    """Start the process. It inherits its end of the socket and no other file."""
    here = str(Path(nanproof.__file__).parents[1]), str(Path(torch.__file__).parents[1])
    paths = [os.path.abspath(path) for path in (*sys.path, *here)]
    arguments = f"{channel.fileno()}, {os.getpid()}, {str(folder)!r}, {keep}"
    text = f"import sys; sys.path[:] = {paths!r}; from nanproof.recover.state._apart import serve; serve({arguments})"
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # the process is born with it: no Ctrl-C while it begins
    try:
        return subprocess.Popen(
            [os.fsdecode(get_executable() or ""), *_flags(), "-c", text],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            pass_fds=[channel.fileno()],
            env=_environment(),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _flags() -> list[str]:
    flags = sys.flags
    asked = (("-I", flags.isolated), ("-E", flags.ignore_environment), ("-s", flags.no_user_site), ("-S", flags.no_site))
    return [name for name, on in asked if on] + ["-W", "ignore"]


def _environment() -> dict[str, str]:
    no_gpu = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"), "")
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONINSPECT"}
    return {**kept, **no_gpu, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def possible() -> bool:
    """Whether a process can be handed memory here."""
    return hasattr(os, "memfd_create") and hasattr(socket, "send_fds") and not getattr(sys, "frozen", False)


class Writer:
    """One process for one store."""

    def __init__(self, store: Store) -> None:
        self._folder, self._keep = store.folder, store.keep
        self._process: Process | None = None
        self._channel: socket.socket | None = None
        self._began = 0.0
        self._answered = False
        self._deaths = 0
        self._known: set[int] = set()
        """Numbers of the arenas that the process has."""
        self._sent: weakref.WeakValueDictionary[int, Arena] = weakref.WeakValueDictionary()
        """Those of them that are still in use."""
        self._twins: list[Arena] = []
        self._starting = threading.Lock()
        """Training starts it ahead of time; the thread that writes, after it was killed."""
        self._owner = os.getpid()

    @property
    def pid(self) -> int | None:
        """The process, if there is one."""
        return None if self._process is None else self._process.pid

    # -- beginning and end -----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the process, unless it is there. Returns at once; it needs seconds to import torch."""
        with self._starting:
            if self._process is not None or self._deaths >= _DEATHS:
                return
            mine, others = socket.socketpair()
            try:
                self._process = launch(others, self._folder, self._keep)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                mine.close()
                self._give_up(reason(error))
                return
            finally:
                others.close()
            self._channel, self._began, self._answered = mine, time.monotonic(), False

    def ready(self, hurry: Callable[[], bool]) -> bool:
        """Wait until the process can write. False where there is none, or somebody cannot wait for it to begin."""
        if self._answered:
            return True
        if self._process is None and hurry():
            return False
        self.start()
        if self._channel is None:
            return False
        heard = select.poll()
        heard.register(self._channel, select.POLLIN)
        while not heard.poll(20):
            if hurry():
                return False
            if time.monotonic() - self._began > _LONGEST_START:
                self._stop()
                self._give_up("it does not begin")
                return False
        try:
            (_, other), _ = receive(self._channel)
            trouble = "" if other == identity() else f"it found another nanproof or torch: {other}"
        except (EOFError, OSError):
            trouble = f"it {self._stop()} as it began"
        if trouble:
            self._stop()
            self._give_up(trouble)
        self._answered = not trouble
        return self._answered

    def close(self) -> None:
        """End the process. One that is still beginning, or idle, has nothing to lose."""
        self._stop()

    def _give_up(self, why: str) -> None:
        self._deaths = _DEATHS
        log.info("nanproof: checkpoints are written by a thread: no process could be started for it: %s", why)

    def _stop(self) -> str:
        """Make sure that the process is gone. Returns how it ended."""
        if os.getpid() != self._owner:  # a forked process: it is not its own, and nobody there gives the lock back
            return "ended"
        with self._starting:
            process, self._process = self._process, None
            channel, self._channel = self._channel, None
            self._answered = False
        self._known.clear()
        if channel is not None:
            channel.close()
        if process is None:
            return "ended"
        if process.poll() is None:
            process.kill()
        code = process.wait()
        return f"was killed by signal {-code}" if code < 0 else f"ended with status {code}"

    # -- work ------------------------------------------------------------------------------------------------------------------

    def write(self, store: Store, snapshot: Snapshot) -> None:
        """As `Store.write`. Raises `Gone` if the process ended, and `Odd` for a state that it cannot be given."""
        if snapshot.sharded:
            raise Odd("sharded tensors")
        host = plain_bytes(snapshot.host)
        whole = snapshot.arena
        places: dict[Arena, list[str] | None] = {whole: None}
        for name, arena in snapshot.frozen.items():
            names = places.setdefault(arena, [])
            assert names is not None
            names.append(name)
        readable = {arena: self._readable(arena) for arena in places}
        self._twins = [arena for arena in readable.values() if arena in self._twins or arena not in places]
        numbers = {arena.number: arena for arena in readable.values()}
        new = [number for number in numbers if number not in self._known]
        gone = [number for number in self._known if number not in self._sent]
        message = {
            "step": snapshot.step,
            "new": {number: _layout(numbers[number]) for number in new},
            "gone": gone,
            "use": [(readable[arena].number, names) for arena, names in places.items()],
            "host": host,
            "own": sorted(snapshot.own),
        }
        self._ask("write", store, message, [block.handle for number in new for block in numbers[number].shared.values()])
        self._sent.update(numbers)
        self._known = {*self._known, *new} - {*gone}

    def promote(self, store: Store, step: int, healthy: int, preempted: bool) -> None:
        """As `Store.promote`. Raises `Gone` if the process ended."""
        self._ask("promote", store, {"step": step, "healthy": healthy, "preempted": preempted})

    def _readable(self, arena: Arena) -> Arena:
        """The same memory where the other process can read it: a copy, of what is kept on a device."""
        if arena.is_shared:
            return arena
        known = next((twin for twin in self._twins if twin.plan == arena.plan), None)
        twin = known or Arena(arena.plan, False, shared=True, pinned=False)
        if not twin.is_shared:
            raise Odd("memory that cannot be shared")
        for device, block in arena.blocks.items():
            beside = torch.cuda.stream(torch.cuda.Stream(device)) if block.device.type == "cuda" else nullcontext()
            with beside:
                twin.blocks[device].copy_(block)
        return twin

    def _ask(self, what: str, store: Store, message: dict[str, Any], handles: Sequence[int] = ()) -> None:
        assert self._channel is not None
        try:
            send(self._channel, (what, {**message, "findings": store.findings}), handles)
            (_, (trouble, findings, lines)), _ = receive(self._channel)
        except (EOFError, OSError):
            self._deaths += 1
            raise Gone(self._stop()) from None
        store.findings = findings
        for level, line in lines:
            log.log(level, "%s", line)
        if trouble:
            raise NotWritten(trouble)


def _layout(arena: Arena) -> Layout:
    found: dict[torch.device, Layout] = {device: [(block.size, [])] for device, block in arena.shared.items()}
    for name, (device, dtype, shape) in arena.plan.items.items():
        found[device][0][1].append((name, arena.starts[name], dtype, shape))
    return [block for blocks in found.values() for block in blocks]
