"""`nanproof scan`: NaN and Inf in checkpoints, and which checkpoint was the last good one."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanproof._errors import UsageError
from nanproof._text import printable
from nanproof.cli._shared import could_not_run

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from nanproof.scan._report import CheckpointReport, FileReport, ScanReport, TensorReport


def scan(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH",
            help="Files (safetensors, torch.save, Lightning), an index of shards, folders of a checkpoint, or folders of many.",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output instead.")] = False,
    denormals: Annotated[bool, typer.Option("--denormals", help="Count denormal numbers too; several times slower.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="List every tensor, not only bad and suspicious ones.")] = False,
    checksums: Annotated[
        bool, typer.Option("--checksums", help="Print the crc32 of each file; compare with manifest.json where there is one.")
    ] = False,
) -> None:
    """Find NaN and Inf in checkpoints. Nothing in them is executed; of several, the last good one is named.

    Exit status: 1 a NaN or an Inf was found, 2 none was found and some file could not be read or was refused, 0 all clean.
    """
    try:
        from nanproof.scan._scan import scan as scan_paths

        with _shown() as progress:
            report = scan_paths(paths, denormals=denormals, checksums=checksums, progress=progress)
    except UsageError as error:
        raise could_not_run(error) from error
    if as_json:
        typer.echo(json.dumps(report.to_json(), allow_nan=False))
    else:
        from rich.console import Console

        width = None if sys.stdout.isatty() else 1000  # names stay whole for whoever searches in them
        _print(Console(markup=False, highlight=False, emoji=False, width=width), report, everything)
    raise typer.Exit({"bad": 1, "refused": 2, "unreadable": 2}.get(report.status, 0))


@contextlib.contextmanager
def _shown() -> Iterator[Callable[[FileReport], None] | None]:
    """On a terminal, the file that was read last."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.text import Text

    with Console(stderr=True, markup=False).status("scanning") as status:
        yield lambda report: status.update(Text(printable(f"scanned {report.path}")))


def _print(console: Console, report: ScanReport, everything: bool) -> None:
    several = len(report.checkpoints) > 1
    if several:
        console.print(_overview(report))
    for checkpoint in report.checkpoints:
        if not several or everything or checkpoint.status != "clean" or checkpoint.checksums:
            _print_checkpoint(console, checkpoint, everything)
    for root, good in report.last_good.items():
        named = "none" if good is None else str(good.path)
        where = "" if len(report.last_good) == 1 else f" in {root}"
        console.print(printable(f"last good{where}: {named}"), soft_wrap=True)


def _print_checkpoint(console: Console, checkpoint: CheckpointReport, everything: bool) -> None:
    if not checkpoint.files:
        console.print(printable(f"{checkpoint.path}: nothing in it to read"), soft_wrap=True)
    for file in checkpoint.files:
        console.print(printable(_line(file)), soft_wrap=True)
        shown = [tensor for tensor in file.tensors if everything or tensor.bad or tensor.notes]
        if shown:
            console.print(_tensors(shown))
    for path, digits in (checkpoint.checksums or {}).items():
        console.print(printable(f"{digits}  {path}"), soft_wrap=True)


def _line(file: FileReport) -> str:
    if file.status in ("refused", "unreadable", "skipped"):
        return f"{file.path}: {file.status}: {file.why}"
    whole = f" and {file.whole} of whole numbers" if file.whole else ""
    bad = sum(tensor.bad for tensor in file.tensors)
    state = f"bad: {bad} of {len(file.tensors)} tensors" if bad else f"clean: {len(file.tensors)} tensors"
    return f"{file.path}: {state}{whole}, {_size(file.bytes)} in {file.seconds:.2f} s, {_speed(file.bytes, file.seconds)}"


def _overview(report: ScanReport) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("checkpoint", overflow="fold")
    for name in ("status", "tensors", "bad", "bytes", "seconds"):
        table.add_column(name, justify="left" if name == "status" else "right", no_wrap=True)
    for checkpoint in report.checkpoints:
        tensors = [tensor for file in checkpoint.files for tensor in file.tensors]
        size, seconds = sum(f.bytes for f in checkpoint.files), sum(f.seconds for f in checkpoint.files)
        bad = str(sum(tensor.bad for tensor in tensors))
        cells = (str(checkpoint.path), checkpoint.status, str(len(tensors)), bad, _size(size), f"{seconds:.2f}")
        table.add_row(*(Text(printable(cell)) for cell in cells))
    return table


def _tensors(tensors: list[TensorReport]) -> RenderableType:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("tensor", overflow="fold", ratio=3)
    table.add_column("type and shape", overflow="fold", ratio=2)
    table.add_column("found", overflow="fold", ratio=2)
    table.add_column("finite numbers", overflow="fold", ratio=2)
    for t in tensors:
        kind = f"{t.dtype} {'x'.join(map(str, t.shape))}".rstrip()
        counts = ((t.nan, "NaN"), (t.posinf, "+Inf"), (t.neginf, "-Inf"))
        found = ", ".join([f"{count} {name}" for count, name in counts if count] + list(t.notes))
        span = "none" if t.min is None or t.max is None else f"{t.min:.4g} to {t.max:.4g}"
        table.add_row(*(Text(printable(cell)) for cell in (t.name, kind, found, span)))
    return table


def _size(count: int) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} B"


def _speed(count: int, seconds: float) -> str:
    return f"{count / 1e9 / seconds:.1f} GB/s" if seconds > 0 else "at once"
