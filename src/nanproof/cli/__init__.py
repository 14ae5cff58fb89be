"""The command line. `app` is the entry point of `nanproof`; `demo_entry` builds what `nanproof demo` trained, for `replay`.

- One file a command: `_demo`, `_doctor`, `_check`, `_run`, `_replay`, `_scan`, `_report`, `_watch`.
- `_shared` holds what all commands share; `_entry` imports the user's `module:function`.
- `_recipe` joins the commands of nanproof-recipes, if it is installed.

Starting it does not import torch; a command does that when it runs.
"""

from __future__ import annotations

from typing import Annotated

import typer

from nanproof import __version__
from nanproof.cli._check import check
from nanproof.cli._demo import demo
from nanproof.cli._demo import entry as demo_entry
from nanproof.cli._doctor import doctor
from nanproof.cli._recipe import recipe
from nanproof.cli._replay import replay
from nanproof.cli._report import report
from nanproof.cli._run import run
from nanproof.cli._scan import scan
from nanproof.cli._shared import Commands
from nanproof.cli._watch import watch

__all__ = ["app", "demo_entry"]

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
