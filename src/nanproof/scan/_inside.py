"""What every reader of foreign files needs: names that stay inside a folder, and what torch found, in a sentence.

It is apart from the readers because importing torch.distributed.checkpoint takes a good part of a second.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from nanproof._errors import NanproofError, RefusedFile
from nanproof._text import one_line

METADATA = ".metadata"
"""The file that makes a folder one of torch.distributed.checkpoint."""


LONGEST_NAME = 255
"""Bytes of a file's name. No file system has longer ones."""


class UnreadableFile(NanproofError):
    """A file is damaged, incomplete or missing. It stays inside the scan, where it becomes a line of the report."""


def path_inside(folder: Path, name: str, said_by: Path, links: bool = False) -> Path:
    """The file in a folder that another file names; refused if it lies outside, or (unless links may) leads there."""
    if not name or "\\" in name or "\0" in name:
        raise RefusedFile(said_by, f"it names {name!r}, which is not a plain file name")
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts:
        raise RefusedFile(said_by, f"it names {name!r}, which lies outside the folder")
    longest = max((len(part.encode("utf-8", "surrogatepass")) for part in parts.parts), default=0)
    if longest > LONGEST_NAME or len(name) > 10 * LONGEST_NAME or not name.isprintable():
        raise RefusedFile(said_by, f"it names {one_line(ascii(name), 200)}, which is not a plain file name")
    path = folder / name
    try:
        within = links or path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError):  # links that go round in circles
        within = False
    if not within:
        raise RefusedFile(said_by, f"it names {name!r}, a link that leads outside the folder")
    return path


def first_line(error: BaseException) -> str:
    """torch explains a refused pickle on a page; one sentence of it names what was found."""
    text = str(error).strip()
    if "GLOBAL " in text:  # "Unsupported global: GLOBAL os.system was not an allowed global by default. ..."
        return one_line("it asks for " + "".join(text.split("GLOBAL ", 1)[1].split()[:1]), 200)
    text = text.split("WeightsUnpickler error:", 1)[-1].strip()
    return one_line(f"{type(error).__name__}: {text.splitlines()[0]}", 200) if text else type(error).__name__
