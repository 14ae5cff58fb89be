"""What the commands of all recipes share: how they say what was wrong, and how they show a result and a comparison."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from nanproof import NanproofError, UsageError
from nanproof_recipes.library import could_not_run, reason, shown

if TYPE_CHECKING:
    from nanproof_recipes.comparison.comparison import Comparison

Out = Annotated[Path, typer.Option(help="Folder; every arm has its own in it.")]
Again = Annotated[bool, typer.Option("--again", help="Do it anew where it is done or begun already.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON on standard output instead.")]


class Told(Protocol):
    """A result of any recipe."""

    def to_json(self) -> dict[str, Any]: ...
    def lines(self) -> list[str]: ...


@contextmanager
def told() -> Iterator[None]:
    """What was wrong with the call or the machine is said in a sentence; exit status 2. Of several processes the first says what
    is wrong with the call: the others have been called alike."""
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
    """Whether this is the process that speaks: torchrun numbers those that it starts."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("RANK", "0") == "0"


def show(result: Told, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result.to_json(), allow_nan=False))
        return
    for line in result.lines():
        typer.echo(shown(line, 4000))  # they are read from a file, which may be anybody's


def compared(found: Comparison, out: Path, as_json: bool) -> None:
    """Write the page, with the report of every run that a guard has watched, and show the table; exit status 1 where a claim does
    not hold."""
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
