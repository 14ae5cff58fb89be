"""`nanproof recipe latent-dlm`: a diffusion language model with two streams, in four arms."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nanproof_recipes.commands.shared import Again, AsJson, Out, compared, finished, first, reporting_errors, working
from nanproof_recipes.library import shown

if TYPE_CHECKING:
    from nanproof_recipes.latent_dlm.running import Studio
    from nanproof_recipes.latent_dlm.showing import Shown

latent_dlm = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="A transformer learns text by unmasking and latents by DDPM: as it was reported broken, as a document patched it, "
    "guarded, and fixed.",
)

Arm = Annotated[str, typer.Option(help="broken, patched, guarded or fixed; fixed-seed-1 is fixed with seed 1.")]
Settings = Annotated[str, typer.Option("--config", help="tiny, base, or a YAML file with some of their keys.")]
Changes = Annotated[
    list[str] | None,
    typer.Option("--set", help="section.key=value, such as optimizer.lr=5e-5; may be given several times. No arm changes it."),
]
How = Literal["ddpm", "ddim"]
OUT = Path("runs/latent-dlm")
PACKAGES = ("diffusers", "msgspec", "yaml", "safetensors")


@latent_dlm.command()
def train(
    arm: Arm = "fixed",
    config: Settings = "tiny",
    changes: Changes = None,
    out: Out = OUT,
    again: Again = False,
    as_json: AsJson = False,
) -> None:
    """Train one arm, measure it on held-out windows and draw samples from it. An arm with a guard goes on where it was stopped.

    On several devices: torchrun --nproc-per-node 2 -m nanproof recipe latent-dlm train --arm fixed

    Exit status: 1 weights are not finite at the end, or training did not finish; 2 it could not run.
    """
    with reporting_errors():
        with working(*PACKAGES):
            from nanproof_recipes.latent_dlm.arms import setting

            chosen = setting(arm)  # before the processes connect
        with _studio(out, config, changes) as studio:
            try:
                result = studio.run(chosen, again=again)
            except KeyboardInterrupt:
                goes = "goes on from the last good checkpoint" if chosen.loop == "guarded" else "begins anew"
                if first():
                    typer.echo(f"stopped: the same command {goes}", err=True)
                raise
        if first():  # alone: torchrun ends the others as soon as one has failed, in the middle of a line
            finished(result, as_json)


@latent_dlm.command("eval")
def evaluate(arm: Arm = "fixed", out: Out = OUT, as_json: AsJson = False) -> None:
    """Measure the model of an arm again, on the same held-out windows. Its result stays as it is.

    Exit status: 1 what was measured is not finite, 2 it could not run.
    """
    with reporting_errors():
        with working(*PACKAGES):
            from nanproof_recipes.latent_dlm.arms import setting
            from nanproof_recipes.latent_dlm.results import measured_lines
            from nanproof_recipes.latent_dlm.running import evaluated
            from nanproof_recipes.latent_dlm.train.team import Team

            chosen = setting(arm)
            found = evaluated(out / chosen.name, Team())
        if as_json:
            from nanproof_recipes.results import plain

            typer.echo(json.dumps({"arm": chosen.name, **plain(found.to_json())}, allow_nan=False))
        else:
            typer.echo("\n".join([f"{chosen.name}:", *measured_lines(found.to_json())]))
        if not found.finite:
            raise typer.Exit(1)


@latent_dlm.command()
def sample(
    arm: Arm = "fixed",
    mode: Annotated[str, typer.Option(help="unconditional, text-to-latent or latent-to-text.")] = "unconditional",
    count: Annotated[int, typer.Option(min=1, help="How many.")] = 4,
    steps: Annotated[int, typer.Option(min=1, help="Forwards of the model; text and latents get cleaner together.")] = 50,
    how: Annotated[How, typer.Option(help="How latents are drawn.")] = "ddpm",
    temperature: Annotated[float, typer.Option(help="Of bytes; 0 takes the likeliest.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Of the drawing.")] = 0,
    text: Annotated[
        str | None,
        typer.Option(
            help="The text that is given, or whose latent is given; without it, held-out windows are.", show_default=False
        ),
    ] = None,
    out: Out = OUT,
    as_json: AsJson = False,
) -> None:
    """Draw text and latents from the model of an arm, and say how well they fit each other.

    Agreement is the cosine between a latent and the latent of the text beside it; chance is about 0.

    Exit status: 1 the model predicts numbers that are not finite, 2 it could not run.
    """
    with reporting_errors():
        with working(*PACKAGES):
            from nanproof_recipes.latent_dlm.arms import setting
            from nanproof_recipes.latent_dlm.model.sampling import NotFinite
            from nanproof_recipes.latent_dlm.showing import drawn_from

            chosen = setting(arm)
            try:
                found = drawn_from(
                    out / chosen.name, mode, text=text, count=count, steps=steps, how=how, temperature=temperature, seed=seed
                )
            except NotFinite as error:
                typer.echo(f"error: {chosen.name}: {error}", err=True)
                raise typer.Exit(1) from error
        if as_json:
            said = {"arm": chosen.name, "mode": mode, "samples": [one.to_json() for one in found]}
            typer.echo(json.dumps(said, allow_nan=False))
        else:
            for number, one in enumerate(found, 1):
                _print(number, one)


@latent_dlm.command()
def compare(
    config: Settings = "tiny",
    changes: Changes = None,
    seeds: Annotated[int, typer.Option(min=0, help="Further seeds of fixed: how far apart they are is what near means.")] = 2,
    out: Out = OUT,
    as_json: AsJson = False,
) -> None:
    """Run every arm and write one table and one page. Arms that are done already are taken as they are.

    Exit status: 1 something that the recipe claims was not seen, 2 it could not run.
    """
    with reporting_errors():
        with _studio(out, config, changes) as studio:
            from nanproof_recipes.latent_dlm.comparing import compare as run

            found = run(studio, seeds)
        if first():
            compared(found, out, as_json)


@contextmanager
def _studio(out: Path, config: str, changes: list[str] | None) -> Iterator[Studio]:
    """Ready to train in, alone or as one of the processes that torchrun started."""
    with working(*PACKAGES) as progress:
        from nanproof_recipes.latent_dlm.config import Config
        from nanproof_recipes.latent_dlm.running import Studio
        from nanproof_recipes.latent_dlm.train.team import team

        made, chosen = Config.load(config, changes or []), Config.chosen(config, changes or [])
        if not first():
            logging.getLogger("nanproof").setLevel(logging.CRITICAL)
        with team() as us:
            yield Studio(out, made, chosen=chosen, team=us, progress=progress)


def _print(number: int, one: Shown) -> None:
    """A model may draw any bytes: none of them steers the terminal."""
    typer.echo(f"-- {number}: {one.mode.replace('_', '-')}, agreement {one.agreement:.3f}")
    if one.mode != "unconditional":
        typer.echo(f"given: {shown(one.told)}")
    if one.mode != "text_to_latent":
        typer.echo(shown(one.text))
