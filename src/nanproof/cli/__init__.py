"""The command line: one file a command. Starting it does not import torch; a command does that when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from nanproof import __version__
from nanproof.cli.check import check
from nanproof.cli.demo import demo
from nanproof.cli.doctor import doctor
from nanproof.cli.group import Commands
from nanproof.cli.recipe import recipe
from nanproof.cli.replay import replay
from nanproof.cli.report import report
from nanproof.cli.run import run
from nanproof.cli.scan import scan
from nanproof.cli.watch import watch

app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command()(demo)
app.command()(doctor)
app.command()(check)
app.command(context_settings={"allow_interspersed_args": False})(run)
app.command()(replay)
app.command()(scan)
app.command()(report)
app.command()(watch)
app.add_typer(recipe, name="recipe")


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"nanproof {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Keeps neural-network training numerically healthy: a bad step never reaches the weights."""
