"""Everything the recipes use of nanproof that is not public. No other file here imports a private module.

This is sound because the two distributions are released together: `pyproject.toml` pins the exact version of nanproof. When a
private name moves, only this file changes. Importing it does not import torch: what needs torch, the command line or the log
readers is a function that imports it when called.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanproof._records import decode, encode
from nanproof._text import duration, one_line, printable, shown
from nanproof.core.support._files import FolderLock, reason, strict_json, sync, write_whole
from nanproof.integrations._patches import Patches
from nanproof.integrations._versions import check_version
from nanproof.report._html import asset, document
from nanproof.report._markdown import plain as escaped
from nanproof.report._out import replace as replace_file
from nanproof.report.folder._run import Run, runs_in
from nanproof.report.folder._series import Extent
from nanproof.report.folder._tokens import find as find_tokens
from nanproof.report.page._cards import cards, without_home
from nanproof.report.page._contents import fact, summary

if TYPE_CHECKING:
    import torch
    import typer

    from nanproof import UsageError

__all__ = [
    "Extent",
    "FolderLock",
    "Patches",
    "Run",
    "asset",
    "cards",
    "check_version",
    "could_not_run",
    "decode",
    "device_name",
    "document",
    "duration",
    "encode",
    "environment",
    "escaped",
    "fact",
    "find_tokens",
    "findings",
    "one_line",
    "printable",
    "reason",
    "rehearsing",
    "replace_file",
    "runs_in",
    "shown",
    "strict_json",
    "summary",
    "sync",
    "without_home",
    "write_report",
    "write_whole",
]


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or the architecture of the machine."""
    from nanproof.core.support._environment import device_name

    return device_name(device)


def environment(device: torch.device) -> dict[str, Any]:
    """Return the versions in use and the device, as a comparison stores them."""
    from nanproof.core.support._environment import versions_now

    return {"versions": versions_now(), "device": str(device), "device_name": device_name(device)}


def rehearsing() -> bool:
    """Return whether nanproof is rerunning a step only to look at it."""
    from nanproof.core.support._context import rehearsal

    return bool(rehearsal)


def findings(log: Path) -> list[str]:
    """Return what `nanproof doctor` finds in a training log, the most important first."""
    from nanproof.logs._story import Story
    from nanproof.logs.judge._findings import judge
    from nanproof.logs.read._sources import find, read

    story = Story()
    for source in find([log]):
        for item in read(source):
            story.add(item)
    return [f"{found.kind}. {found.said}" for found in judge(story)]


def could_not_run(error: UsageError) -> typer.Exit:
    """Print the error and its hint on standard error; return exit status 2."""
    from nanproof.cli._shared import could_not_run

    return could_not_run(error)


def write_report(run: Path) -> None:
    """Write the HTML report of a guarded run into its folder."""
    from nanproof.report._html import write

    write(run)
