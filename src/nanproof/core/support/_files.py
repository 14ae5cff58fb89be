"""Files that are whole or not there: flushed before they are renamed, and written by one process at a time."""

from __future__ import annotations

import json
import os
import queue
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from nanproof._access import OddFile, create, open_own
from nanproof._errors import NanproofError, UsageError
from nanproof._text import one_line, shown

try:
    import fcntl
except ImportError:  # not a POSIX system: no locks there
    fcntl = None  # type: ignore[assignment]

LOCK = "lock"
_HELPER = 1 << 30
"""The byte of the lock file that a process locks which writes for the holder of the rest."""
_PATIENCE = 60.0
"""Seconds for the helper of a process that has ended to end as well. It takes milliseconds, but for a disk that hangs."""


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def strict_json(data: Mapping[str, Any]) -> str:
    """One line a field."""
    fields = (f" {json.dumps(name)}: {json.dumps(value, allow_nan=False)}" for name, value in data.items())
    return "{\n" + ",\n".join(fields) + "\n}\n"


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file that is there with all of its content, or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with create(partial) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)
        sync(path.parent)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def reason(error: BaseException) -> str:
    """What an error says, in few words that can be shown."""
    if isinstance(error, OSError) and error.strerror:
        return shown(f"{error.strerror} ({error.filename})" if error.filename else error.strerror)
    return shown(error if isinstance(error, NanproofError) else f"{type(error).__name__}: {error}")


def not_writable(what: str, error: OSError) -> UsageError:
    """The error for a folder that cannot be written, which names the file that stands in the way."""
    if isinstance(error, OddFile):
        file = one_line(error.filename)
        return UsageError(f"{what} cannot be written: {file}: {error.strerror}. Remove it, or choose another folder")
    return UsageError(f"{what} cannot be written: {reason(error)}. Choose a folder that can be written")


def finish(jobs: queue.Queue[Any], worker: threading.Thread, pid: int) -> None:
    """Let a thread that takes jobs from a queue do what is left, and end it with None."""
    if os.getpid() != pid:
        return  # a forked process has no such thread
    jobs.put(None)
    if worker is not threading.current_thread():
        worker.join()


class FolderLock:
    """One process writes to a folder at a time. The system takes the lock back when the process dies, however it dies.

    A lock of the process, not of an open file: a forked data worker that outlives a killed run does not hold it.
    """

    _held: ClassVar[dict[Path, tuple[int, int]]] = {}
    """Folder: the open lock file, and how many of this process use it. Closing any copy of it would give the lock back."""

    def __init__(self, folder: Path, what: str) -> None:
        self._folder = folder.resolve()
        handle, users = self._held.get(self._folder, (-1, 0))
        if not users:
            handle = self._take(folder / LOCK, what)
        self._held[self._folder] = handle, users + 1
        self._open = True

    def release(self) -> None:
        if not self._open:
            return
        self._open = False
        handle, users = self._held.pop(self._folder)
        if users > 1:
            self._held[self._folder] = handle, users - 1
        elif handle >= 0:
            os.close(handle)

    def _take(self, path: Path, what: str) -> int:
        if fcntl is None:
            return -1
        handle = open_own(path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, _HELPER)
            _wait_for_helper(handle)
        except (BlockingIOError, PermissionError):
            holder = one_line(os.pread(handle, 200, 0).decode(errors="replace")) or "unknown"
            os.close(handle)
            raise UsageError(
                f"{what} is in use by another process ({holder}): end that one, or give this run a folder of its own"
            ) from None
        except OSError:  # a file system without locks
            return handle
        try:
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except OSError:
            os.close(handle)
            raise
        return handle


def _wait_for_helper(handle: int) -> None:
    """Wait until no helper process still writes on behalf of the last holder of this lock."""
    until = time.monotonic() + _PATIENCE
    while True:
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _HELPER)
        except (BlockingIOError, PermissionError):
            if time.monotonic() > until:
                raise
            time.sleep(0.01)
        else:
            fcntl.lockf(handle, fcntl.LOCK_UN, 1, _HELPER)
            return


def lock_as_helper(folder: Path) -> None:
    """Lock a folder, until this process ends, for writing on behalf of the process that holds its `FolderLock`."""
    if fcntl is None:
        return
    handle = open_own(folder / LOCK, os.O_RDWR)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _HELPER)
    except (BlockingIOError, PermissionError):
        os.close(handle)
        raise
    except OSError:  # a file system without locks
        pass
