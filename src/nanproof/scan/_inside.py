"""What every reader of foreign files needs: names that stay inside a folder, and what torch found, in a sentence.

It is apart from the readers because importing torch.distributed.checkpoint takes a good part of a second.
"""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from nanproof._errors import NanproofError, RefusedFile

METADATA = ".metadata"
"""The file that makes a folder one of torch.distributed.checkpoint."""


class UnreadableFile(NanproofError):
    """A file is damaged, incomplete or missing. It stays inside the scan, where it becomes a line of the report."""


def path_inside(folder: Path, name: str, said_by: Path, links: bool = False) -> Path:
    """The file in a folder that another file names; refused if it lies outside, or (unless links may) leads there."""
    if not name or "\\" in name or "\0" in name:
        raise RefusedFile(said_by, f"it names {name!r}, which is no plain file name")
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts:
        raise RefusedFile(said_by, f"it names {name!r}, which lies outside the folder")
    path = folder / name
    if not links and not path.resolve().is_relative_to(folder.resolve()):
        raise RefusedFile(said_by, f"it names {name!r}, a link that leads outside the folder")
    return path


def first_line(error: BaseException) -> str:
    """torch explains a refused pickle on a page; one sentence of it names what was found."""
    text = str(error).strip()
    if "GLOBAL " in text:  # "Unsupported global: GLOBAL os.system was not an allowed global by default. ..."
        return "it asks for " + text.split("GLOBAL ", 1)[1].split()[0]
    text = text.split("WeightsUnpickler error:", 1)[-1].strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:200]}" if text else type(error).__name__
