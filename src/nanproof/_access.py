"""Open files that somebody else may have put there.

A reader opens regular files only: a pipe would make it wait forever, and a device never ends. It reads a bounded number of bytes.
A writer follows no symbolic link and creates its files itself, so that nothing outside the folder is ever changed.

Every refusal is an `OddFile`, an OSError whose `strerror` says what the file is.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TextIO

SMALL = 16 << 20
"""Bytes of a file that holds settings, marks or a manifest. A larger one is not what it claims to be."""

MOST_VALUES = 5_000_000
"""Values of a JSON text. Each takes up to a hundred bytes, however few characters it is written in."""

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
    """The lines of a file, without one that is not finished yet. One of more than `most` bytes is empty."""
    while text := file.readline(most):
        if text.endswith(b"\n"):
            yield text
            continue
        long = len(text) == most
        while text and not text.endswith(b"\n"):
            text = file.readline(most)
        if not (long and text):
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


def open_own(path: str | os.PathLike[str], flags: int, mode: int = 0o644) -> int:
    """Open a regular file to write to, by `os.open` flags. A symbolic link is refused."""
    try:
        handle = os.open(path, flags | _NO_LINK | _COMMON, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OddFile(errno.ELOOP, "it is a symbolic link, and nothing is written through links", os.fspath(path)) from None
        if error.errno == errno.ENXIO:
            raise OddFile(errno.ENXIO, "it is a pipe, a socket or a device, not a regular file", os.fspath(path)) from None
        raise
    return _checked(handle, path)


def open_append(path: str | os.PathLike[str]) -> TextIO:
    """Open a text file to append lines to, and create it if it is missing. Each line is written at once."""
    handle = open_own(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    return os.fdopen(handle, "a", buffering=1, encoding="utf-8")


def create(path: str | os.PathLike[str]) -> BinaryIO:
    """Create a file to write to. A file or link that is in its place is removed, never written through."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    return os.fdopen(open_own(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")


def own_folder(path: Path) -> None:
    """Create a folder if it is missing. A link in its place is refused: what goes into it would go elsewhere."""
    if path.is_symlink():
        raise OddFile(errno.ELOOP, "it is a symbolic link, and nothing is written through links", str(path))
    path.mkdir(parents=True, exist_ok=True)


def _checked(handle: int, path: str | os.PathLike[str]) -> int:
    """Return the handle of a regular file. Close it and raise otherwise."""
    kind = os.fstat(handle).st_mode
    if stat.S_ISREG(kind):
        return handle
    os.close(handle)
    if stat.S_ISDIR(kind):
        raise IsADirectoryError(errno.EISDIR, "it is a folder", os.fspath(path))
    raise OddFile(errno.EINVAL, "it is a pipe, a socket or a device, not a regular file", os.fspath(path))
