"""What the commands of all recipes share: their common options, errors, and how they print results and comparisons.

Packages that are only imported (DeepSpeed, by way of accelerate) write to standard output. All work therefore runs with standard
output sent to standard error, so that `--json` prints JSON and nothing else.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from nanproof import NanproofError, UsageError
from nanproof_recipes.library import could_not_run, reason, shown

if TYPE_CHECKING:
    from nanproof_recipes.comparison.comparison import Comparison
    from nanproof_recipes.progress import Progress
    from nanproof_recipes.results import BaseResult

Arm = Annotated[str, typer.Option(help="broken, patched, guarded or fixed.")]
Out = Annotated[Path, typer.Option(help="Folder; every arm has its own in it.")]
Again = Annotated[bool, typer.Option("--again", help="Do it anew where it is done or begun already.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output instead.")]


class Shown(Protocol):
    """Something that is printed as JSON or as lines."""

    def to_json(self) -> dict[str, Any]: ...
    def lines(self) -> list[str]: ...


@contextmanager
def reporting_errors() -> Iterator[None]:
    """Report a wrong call or a failing machine in a sentence; exit status 2. Of several processes only the first reports a wrong
    call: the others were called alike."""
    try:
        yield
    except UsageError as error:
        if not first():
            raise typer.Exit(2) from error
        raise could_not_run(error) from error
    except NanproofError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    except BrokenPipeError:
        raise
    except OSError as error:  # a folder that cannot be written, a disk that is full; 1 would say that weights are not finite
        typer.echo(f"error: {shown(reason(error), 4000)}", err=True)
        raise typer.Exit(2) from error


def first() -> bool:
    """Return whether this process prints: torchrun numbers the processes that it starts."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


@contextmanager
def working(*packages: str) -> Iterator[Progress]:
    """Check that the packages are there, and keep standard output clean while the work runs. Yields its progress bars."""
    with redirect_stdout(sys.stderr):
        from rich.console import Console

        from nanproof_recipes.commands.quiet import quiet
        from nanproof_recipes.machine import needs
        from nanproof_recipes.progress import Progress

        needs(*packages)
        with quiet() if "transformers" in packages else nullcontext():
            yield Progress(Console(stderr=True))


def show(result: Shown, as_json: bool) -> None:
    """Print a result."""
    if as_json:
        typer.echo(json.dumps(result.to_json(), allow_nan=False))
        return
    for line in result.lines():
        typer.echo(shown(line, 4000))  # they are read from a file, which may be anybody's


def finished(result: BaseResult, as_json: bool) -> None:
    """Print a result; exit status 1 if weights are not finite, or training did not finish."""
    show(result, as_json)
    if result.nonfinite or result.ending != "finished":
        raise typer.Exit(1)


def compared(found: Comparison, out: Path, as_json: bool) -> None:
    """Write the page and the report of every guarded run, and print the table; exit status 1 if a claim does not hold."""
    from nanproof_recipes.comparison.comparison import rich_table, write
    from nanproof_recipes.library import write_report

    for arm in found.arms:
        if arm.run is not None:
            write_report(out / arm.run)
    page = write(found, out)
    if as_json:
        typer.echo(json.dumps(found.to_json(), allow_nan=False))
    else:
        from rich.console import Console

        console = Console()
        console.print(rich_table(found))
        for check in found.checks:
            said = f"{'holds' if check.holds else 'DOES NOT HOLD'}: {check.claim} ({check.measured})"
            console.print(shown(said, 4000), markup=False, highlight=False)
        console.print(f"page: {page}", markup=False, highlight=False, soft_wrap=True)
    if not all(check.holds for check in found.checks):
        raise typer.Exit(1)
