"""`nanproof recipe`: the commands of the distribution nanproof-recipes, if it is installed."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points
from typing import Any

import typer
from typer.core import TyperGroup

from nanproof import __version__

ENTRY_POINTS = "nanproof.commands"
"""The entry point `recipe` of this group is a Typer app. It is looked up when the command is called, not before."""


class Recipes(TyperGroup):
    """A group whose commands another distribution brings."""

    def list_commands(self, ctx: Any) -> list[str]:
        found = self._joined(ctx)
        return found.list_commands(ctx) if found is not None else []

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        found = self._joined(ctx)
        return found.get_command(ctx, cmd_name) if found is not None else None

    def _joined(self, ctx: Any) -> Any:
        try:
            return _commands()
        except ImportError as error:
            if ctx.resilient_parsing:  # the shell asks for completions
                return None
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(2) from error


@cache
def _commands() -> Any:
    """Return the group that nanproof-recipes brings. An ImportError says how to get it."""
    found = next(iter(entry_points(group=ENTRY_POINTS, name="recipe")), None)
    if found is None:
        how = "pip install nanproof-recipes (in a clone: pip install . ./recipes)"
        raise ImportError(f"the recipes are a separate package: {how}")
    try:
        return typer.main.get_command(found.load())
    except ImportError as error:
        how = f"pip install nanproof-recipes=={__version__}"
        raise ImportError(f"nanproof-recipes does not fit nanproof {__version__} ({error}): {how}") from error


recipe = typer.Typer(
    cls=Recipes,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Three real failures, each reproduced, compared and fixed.",
)


@recipe.callback()
def _recipe() -> None:
    """Keep `recipe` a group although it has no commands of its own."""
