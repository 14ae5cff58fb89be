"""Writing a report: all of it or nothing, and never over what the run itself has written.

Nothing is written through a link, a pipe or a device that lies in the run's folder: the folder may be a stranger's. Elsewhere
they are followed: whoever names `/dev/stdout` or a link of their own means it.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from nanproof._access import OddFile, check_own, create
from nanproof._errors import UsageError
from nanproof._text import one_line


def put(path: Path, text: str, run: Path) -> None:
    """There with all of its text, or as it was before; never one of the run's records."""
    home = Path(os.path.realpath(run))
    try:
        for part in (path, *path.parents):
            if Path(os.path.realpath(part.parent)).is_relative_to(home):
                check_own(part)
    except OddFile as error:
        file = one_line(error.filename)
        raise UsageError(f"{file} cannot be written: {error.strerror}. Remove it, or name another file with --out") from error
    path = Path(os.path.realpath(path))
    if _evidence(path, home):
        raise UsageError(f"{path} belongs to the run: a report is not written over its records. Name another file with --out")
    replace(path, text)


def replace(path: Path, text: str) -> None:
    """Another text in place of what is there, all of it or none. A link is followed; a device or a pipe is written to."""
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_text(text, encoding="utf-8", newline="\n")
        return
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with create(partial) as file:
            file.write(text.encode())
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise


def _evidence(path: Path, run: Path) -> bool:
    """Records, bundles and checkpoints: every file of the run's folder that is not a report."""
    report = path.suffix.lower() in (".html", ".md", ".txt") or path.stem == "report"
    return path.is_relative_to(run) and path.is_file() and not report
