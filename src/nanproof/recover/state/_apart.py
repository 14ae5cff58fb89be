"""The process that writes checkpoints for a run: it does what it is told until the run's process ends, however that ends.

It shares nothing with the run but memory to read from and a socket. It has no `__main__` of the user's, sees no GPU, and ignores
the signals that end a run: they may be sent to the whole group, and it is the run that decides when the end is.
"""

from __future__ import annotations

import logging
import os
import pickle
import select
import signal
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

import nanproof
from nanproof.core.support._files import lock_as_helper, reason
from nanproof.core.support._ranks import Ranks
from nanproof.recover.state._pipe import receive, send
from nanproof.recover.state._shared import mapped, part
from nanproof.recover.state._store import Store

SIGNALS = tuple(
    number
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if (number := getattr(signal, name, None)) is not None
)
"""Schedulers and shells send these to every process of a run."""
Layout: TypeAlias = list[tuple[int, list[tuple[str, int, torch.dtype, tuple[int, ...]]]]]
"""Of each block of memory its size, and of each tensor in it: name, place, kind and shape."""
_LOOK = 0.2
"""Seconds between two looks for the run's process, where the system does not report its end."""


def identity() -> tuple[str, str]:
    """What both processes must have alike."""
    return str(nanproof.__file__), torch.__version__


def serve(handle: int, run: int, folder: str, keep: int) -> None:
    """Write what the process `run` sends through the socket `handle`, and end with it."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    threading.Thread(target=_end_with, args=(run,), daemon=True).start()
    with suppress(OSError):
        os.nice(10)  # training comes first where they have to share a core
    torch.set_num_threads(1)
    channel = socket.socket(fileno=handle)
    lines = Lines()
    try:
        lock_as_helper(Path(folder))
        store = Store(folder, keep, Ranks(nn.Module(), torch.device("cpu")), lock=False)
        send(channel, ("ready", identity()))
        states: dict[int, dict[str, Tensor]] = {}
        while True:
            (what, told), handles = receive(channel)
            trouble = ""
            try:
                store.findings = told.pop("findings")
                _DO[what](store, states, handles, **told)
            except Exception as error:
                trouble = reason(error)
            send(channel, ("done", (trouble, store.findings, lines.taken())))
    except (EOFError, OSError):
        pass  # the run has ended, or wants no more


def _write(
    store: Store,
    states: dict[int, dict[str, Tensor]],
    handles: list[int],
    step: int,
    new: Mapping[int, Layout],
    gone: list[int],
    use: list[tuple[int, list[str] | None]],
    host: bytes,
    own: list[str],
) -> None:
    for number in gone:
        states.pop(number, None)
    try:
        try:
            waiting = iter(handles)
            for number, blocks in new.items():
                states[number] = {}
                for size, inside in blocks:
                    block = mapped(next(waiting), size)
                    states[number].update({name: part(block, start, dtype, shape) for name, start, dtype, shape in inside})
        finally:
            for handle in handles:
                os.close(handle)
        tensors: dict[str, Tensor] = {}
        for number, names in use:
            there = states[number]
            tensors.update(there if names is None else {name: there[name] for name in names})
        store.write(step, tensors, pickle.loads(host), own)
    except BaseException:
        for number in new:  # the run does not count on them, and would never say that they are gone
            states.pop(number, None)
        raise


def _promote(
    store: Store, states: dict[int, dict[str, Tensor]], handles: list[int], step: int, healthy: int, preempted: bool
) -> None:
    store.promote(step, healthy, preempted)


_DO: dict[str, Any] = {"write": _write, "promote": _promote}


class Lines(logging.Handler):
    """What the store logs, for the run's process to log."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._lines: list[tuple[int, str]] = []
        logger = logging.getLogger("nanproof")
        logger.handlers, logger.propagate = [self], False
        logger.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((record.levelno, record.getMessage()))

    def taken(self) -> list[tuple[int, str]]:
        found, self._lines = self._lines, []
        return found


def _end_with(run: int) -> None:
    """End this process as soon as the run's has ended, whatever is being written: nothing half done has a plain name.

    The socket does not tell: a data worker that was forked from the run may have it open too.
    """
    seen, longest = select.poll(), _LOOK
    with suppress(AttributeError, OSError):
        seen.register(os.pidfd_open(run), select.POLLIN)
        longest = 10.0
    while os.getppid() == run:
        seen.poll(1000 * longest)
    os._exit(1)
