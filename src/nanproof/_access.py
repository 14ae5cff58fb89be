"""Open files that somebody else may have put there.

A reader opens regular files only: a pipe would make it wait forever, and a device never ends. It reads a bounded number of bytes.
A writer follows no symbolic link and creates its files itself, so that nothing outside the folder is ever changed.

Every refusal is an `OddFile`, an OSError whose `strerror` says what the file is.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

SMALL = 16 << 20
"""Bytes of a file that holds settings, marks or a manifest. A larger one is not what it claims to be."""

MOST_VALUES = 5_000_000
"""Values of a JSON text. Each takes up to a hundred bytes, however few characters it is written in."""

_LINK = "it is a symbolic link, and nothing is written through links"
_SPECIAL = "it is a pipe, a socket or a device, not a regular file"
_NO_LINK = getattr(os, "O_NOFOLLOW", 0)
_COMMON = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)


class OddFile(OSError):
    """A file that is not what its name promises: a pipe, a device, a link to write through, or far too large."""


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file for reading. A link to one is followed."""
    return os.fdopen(_checked(os.open(path, os.O_RDONLY | _COMMON), path), "rb")


def read_bytes(path: str | os.PathLike[str], most: int = SMALL) -> bytes:
    """Return the content of a regular file of at most `most` bytes."""
    with open_regular(path) as file:
        data = file.read(most + 1)
    if len(data) > most:
        raise OddFile(errno.EFBIG, f"it has more than {most:,} bytes", os.fspath(path))
    return data


def read_json(path: str | os.PathLike[str], most: int = SMALL) -> Any:
    """Return what a JSON file of at most `most` bytes holds. Raises ValueError if it is not JSON."""
    return parse_json(read_bytes(path, most).decode("utf-8"))


def whole_lines(file: BinaryIO, most: int = SMALL) -> Iterator[bytes]:
    """The lines of a file, without one that is not finished yet. One of more than `most` bytes is empty, and one of more than
    sixteen times as many is the last: no record is that long, and nobody waits for the end of a terabyte."""
    while text := file.readline(most):
        if text.endswith(b"\n"):
            yield text
            continue
        long = len(text) == most
        for _ in range(16):
            if not text or text.endswith(b"\n"):
                break
            text = file.readline(most)
        if not (long and text.endswith(b"\n")):
            return
        yield b""


def parse_json(text: str | bytes, **options: Any) -> Any:
    """`json.loads`, but nesting too deep for Python, and more values than memory is meant for, are a ValueError like any other
    damage."""
    marks: tuple[Any, ...] = ("[", "{", ",", ":") if isinstance(text, str) else (b"[", b"{", b",", b":")
    if len(text) > MOST_VALUES and sum(map(text.count, marks)) > MOST_VALUES:
        raise ValueError(f"more than {MOST_VALUES:,} values")
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("nested too deep") from None


def open_own(path: str | os.PathLike[str], flags: int) -> int:
    """Open a regular file to write to, by `os.open` flags. A symbolic link is refused."""
    try:
        handle = os.open(path, flags | _NO_LINK | _COMMON, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OddFile(errno.ELOOP, _LINK, os.fspath(path)) from None
        if error.errno == errno.ENXIO:
            raise OddFile(errno.ENXIO, _SPECIAL, os.fspath(path)) from None
        raise
    return _checked(handle, path)


def open_append(path: str | os.PathLike[str]) -> int:
    """Open a file to append to, and create it if it is missing. Returns its handle."""
    return open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def check_own(path: str | os.PathLike[str]) -> None:
    """Raise `OddFile` if a file that will be written to is a link, a pipe or a device. It may be missing."""
    try:
        kind = os.lstat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return
    if stat.S_ISLNK(kind):
        raise OddFile(errno.ELOOP, _LINK, os.fspath(path))
    if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):
        raise OddFile(errno.EINVAL, _SPECIAL, os.fspath(path))


def create(path: str | os.PathLike[str]) -> BinaryIO:
    """Create a file to write to. A file or link that is in its place is removed, never written through."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    return os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")


def own_folder(path: Path) -> None:
    """Create a folder if it is missing. A link in its place is refused: what goes into it would go elsewhere."""
    check_own(path)
    path.mkdir(parents=True, exist_ok=True)


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a file, a folder with all that is in it, or a link but not what it points to. What cannot be removed stays."""
    with suppress(OSError, RecursionError):
        if stat.S_ISDIR(os.lstat(path).st_mode):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.unlink(path)  # shutil.rmtree would leave a link there, and wait for a pipe forever


def _checked(handle: int, path: str | os.PathLike[str]) -> int:
    """Return the handle of a regular file. Close it and raise otherwise."""
    kind = os.fstat(handle).st_mode
    if stat.S_ISREG(kind):
        return handle
    os.close(handle)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", os.fspath(path))
    raise OddFile(errno.EINVAL, _SPECIAL, os.fspath(path))
