"""`nanproof recipe vlm-grpo`: a vision-language model trained by GRPO, in four arms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from nanproof import UsageError
from nanproof_recipes.commands.shared import Again, Arm, AsJson, Out, compared, finished, reporting_errors, show, working

if TYPE_CHECKING:
    from nanproof_recipes.progress import Progress
    from nanproof_recipes.vlm_grpo.running import Workshop

vlm_grpo = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="A vision-language model learns by GRPO to describe a marked region: as it was reported broken, as a document patched "
    "it, guarded, and fixed.",
)

Variant = Annotated[str, typer.Option(help="Of broken and guarded: group, a plain loop with groups of one reply.")]
Model = Annotated[str, typer.Option(help="tiny, base, or a folder with a model of images and text and its processor.")]
Trainer = Annotated[
    str | None,
    typer.Option(help="trl: TRL's GRPOTrainer, as in every arm; loop: the recipe's own, which needs no TRL.", show_default=False),
]
Steps = Annotated[int | None, typer.Option(help="Steps of GRPO; 100 in every arm.", show_default=False)]
Rate = Annotated[float | None, typer.Option(help="Learning rate; 1e-3 in every arm.", show_default=False)]
Batch = Annotated[int | None, typer.Option(help="Replies of a step; 128, and 32 with groups of one.", show_default=False)]
Group = Annotated[int | None, typer.Option(help="Replies to one question; 8, at least 2.", show_default=False)]
Beta = Annotated[float | None, typer.Option(help="Weight of the divergence from the reference; 0.02.", show_default=False)]
Heat = Annotated[float | None, typer.Option(help="Temperature of the sampling; 1.", show_default=False)]
Norm = Annotated[float | None, typer.Option(help="Gradients are clipped to it; 1, in fixed 0.5.", show_default=False)]
Rank = Annotated[int | None, typer.Option(help="Rank of LoRA; 16.", show_default=False)]
Chosen = Annotated[
    Literal["as-loaded", "auto", "bf16", "fp32"] | None,
    typer.Option(help="as-loaded is fp32; fixed has auto.", show_default=False),
]
Seed = Annotated[int, typer.Option(help="Of adapters, order of the scenes and sampling.")]
Train = Annotated[int, typer.Option("--train", min=1, help="Scenes to train on.")]
Valid = Annotated[int, typer.Option("--valid", min=1, help="Held-out scenes to ask about.")]
WarmSteps = Annotated[
    int | None, typer.Option("--sft-steps", min=1, help="Steps of the warm start; 250, of base 130.", show_default=False)
]
OUT = Path("runs/vlm-grpo")
TINY = "tiny"
PACKAGES = ("transformers", "peft", "accelerate", "PIL")


@vlm_grpo.command()
def data(
    out: Out = OUT,
    train: Train = 3000,
    valid: Valid = 500,
    seed: Annotated[int, typer.Option(help="Of the scenes.")] = 0,
    pictures: Annotated[int, typer.Option(min=0, help="So many scenes also as PNG, each with its mask, to look at.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Make the scenes: two sets that have none in common, the same for the same seed."""
    with reporting_errors():
        from nanproof_recipes.vlm_grpo.data import scenes

        made = scenes.make(train, valid, seed)
        if pictures:
            from nanproof_recipes.machine import needs

            needs("PIL")
        paths = {name: str(path) for name, path in scenes.keep(out, made).items()}
        said = {**paths, "scenes": {"train": train, "valid": valid}}
        if pictures:
            from nanproof_recipes.vlm_grpo.data.pictures import write_pictures

            said["pictures"] = [str(path) for path in write_pictures(out / "data" / "pictures", made["train"][:pictures])]
        if as_json:
            typer.echo(json.dumps(said))
            return
        typer.echo(f"{train} scenes to train on: {paths['train']}\n{valid} to be asked about: {paths['valid']}")
        if pictures:
            typer.echo(f"{len(said['pictures'])} pictures with their masks: {out / 'data' / 'pictures'}")
        for scene in made["train"][:3]:
            typer.echo(f"  {scene.question}  ->  {scene.answer}")


@vlm_grpo.command()
def sft(
    model: Model = TINY,
    sft_steps: WarmSteps = None,
    train: Train = 3000,
    valid: Valid = 500,
    out: Out = OUT,
    again: Again = False,
    as_json: AsJson = False,
) -> None:
    """Make the warm start that every arm begins with: training on right answers, under a guard.

    Exit status: 2 it could not run.
    """
    with reporting_errors():
        with _workshop(out, model, train, valid, sft_steps) as workshop:
            result = workshop.warm(again)
        show(result, as_json)


@vlm_grpo.command()
def train(
    arm: Arm = "fixed",
    variant: Variant = "",
    model: Model = TINY,
    trainer: Trainer = None,
    steps: Steps = None,
    lr: Rate = None,
    batch: Batch = None,
    group: Group = None,
    beta: Beta = None,
    temperature: Heat = None,
    max_norm: Norm = None,
    rank: Rank = None,
    precision: Chosen = None,
    seed: Seed = 0,
    train: Train = 3000,
    valid: Valid = 500,
    sft_steps: WarmSteps = None,
    out: Out = OUT,
    again: Again = False,
    as_json: AsJson = False,
) -> None:
    """Train one arm by GRPO, from the warm start on, which is made if it is not there, and ask its model about held-out scenes.

    Exit status: 1 weights are not finite at the end, or training did not finish; 2 it could not run.
    """
    with reporting_errors():
        from nanproof_recipes.vlm_grpo.arms import setting

        how = {"trainer": trainer, "steps": steps, "lr": lr, "batch": batch, "group": group, "beta": beta}
        more = {"temperature": temperature, "max_norm": max_norm, "rank": rank, "precision": precision, "seed": seed}
        chosen = setting(arm, variant, **how, **more)
        with _workshop(out, model, train, valid, sft_steps, chosen.trainer) as workshop:
            result = workshop.arm(chosen, again=again)
        finished(result, as_json)


@vlm_grpo.command("test")
def ask(
    arm: Annotated[str, typer.Option(help="An arm that was trained in --out, or warm.")] = "fixed",
    variant: Variant = "",
    seed: Seed = 0,
    out: Out = OUT,
    as_json: AsJson = False,
) -> None:
    """Ask the model of an arm about the held-out scenes again: with model, scenes and warm start as they are in --out. Its
    result stays as it is.

    Exit status: 1 the model cannot be sampled from, 2 it could not run.
    """
    with reporting_errors():
        from nanproof_recipes.vlm_grpo.arms import setting

        name = arm if arm == "warm" else setting(arm, variant, seed=seed).name
        with working(*PACKAGES) as progress:
            from nanproof_recipes.vlm_grpo.running import Workshop

            workshop = Workshop.found(out, progress)
            _one_thread(workshop.model_name)
            result = workshop.test(name)
        show(result, as_json)
        if result.reward is None:
            raise typer.Exit(1)


@vlm_grpo.command()
def smoke(
    arm: Arm = "fixed",
    variant: Variant = "",
    fault: Annotated[
        str, typer.Option(help="Put into one step: none, logits (a NaN), gradient (an Inf) or reward (a NaN).")
    ] = "none",
    model: Model = TINY,
    trainer: Trainer = None,
    steps: Annotated[int, typer.Option(help="Steps of GRPO.")] = 6,
    batch: Annotated[int, typer.Option(help="Replies of a step.")] = 32,
    group: Annotated[int | None, typer.Option(help="Replies to one question; 4.", show_default=False)] = None,
    seed: Seed = 0,
    sft_steps: Annotated[
        int, typer.Option("--sft-steps", min=1, help="Steps of the warm start, if there is none in --out.")
    ] = 30,
    out: Out = OUT,
    as_json: AsJson = False,
) -> None:
    """Train a few steps and look at losses, gradients, logits, rewards and weights: a test before a long run.

    Exit status: 0 healthy, nothing bad was met; 1 handled, something was, it was refused, ended or masked, and training went on;
    3 failed, training died or halted, or weights are not finite, or nobody has handled what was met; 2 it could not run.
    """
    with reporting_errors():
        from nanproof_recipes.vlm_grpo.arms import setting

        size = group if group is not None else None if variant == "group" else 4
        chosen = setting(arm, variant, trainer=trainer, steps=steps, batch=batch, group=size, seed=seed)
        with _working(chosen.trainer) as progress:
            from nanproof_recipes.vlm_grpo.smoke import EXIT
            from nanproof_recipes.vlm_grpo.smoke import smoke as run

            _one_thread(model)
            found = run(out, chosen, model, fault=fault, sft_steps=sft_steps, progress=progress)
        show(found, as_json)
        raise typer.Exit(EXIT[found.outcome])


@vlm_grpo.command()
def compare(
    model: Model = TINY,
    seeds: Annotated[int, typer.Option(min=0, help="Further seeds of guarded and of fixed.")] = 2,
    jobs: Annotated[int, typer.Option(min=1, help="Arms trained at a time, each by a process with one thread.")] = 1,
    trainer: Trainer = None,
    steps: Steps = None,
    lr: Rate = None,
    batch: Batch = None,
    group: Group = None,
    beta: Beta = None,
    temperature: Heat = None,
    rank: Rank = None,
    train: Train = 3000,
    valid: Valid = 500,
    sft_steps: WarmSteps = None,
    out: Out = OUT,
    as_json: AsJson = False,
) -> None:
    """Run every arm and write one table and one page. Arms that are done already are taken as they are.

    Exit status: 1 something that the recipe claims was not seen, 2 it could not run.
    """
    with reporting_errors():
        how = {"trainer": trainer, "steps": steps, "lr": lr, "batch": batch, "group": group, "beta": beta}
        more = {"temperature": temperature, "rank": rank}
        with _workshop(out, model, train, valid, sft_steps, trainer or "trl") as workshop:
            from nanproof_recipes.vlm_grpo.comparing import compare as run

            found = run(workshop, seeds, {**how, **more}, jobs)
        compared(found, out, as_json)


def _one_thread(model: str) -> None:
    """A tiny model does not keep two cores busy: threads only wait for each other, and much longer where others compute too."""
    if model == TINY:
        import torch

        torch.set_num_threads(1)


@contextmanager
def _workshop(out: Path, model: str, train: int, valid: int, sft_steps: int | None, trainer: str = "loop") -> Iterator[Workshop]:
    with _working(trainer) as progress:
        from nanproof_recipes.vlm_grpo.running import Workshop
        from nanproof_recipes.vlm_grpo.train.warm import schooling_for

        _one_thread(model)
        yield Workshop(out, model, train=train, valid=valid, schooling=schooling_for(model, sft_steps), progress=progress)


@contextmanager
def _working(trainer: str) -> Iterator[Progress]:
    with working(*PACKAGES) as progress:
        from nanproof_recipes.machine import needs

        if trainer == "trl":
            try:
                needs("trl", "datasets")
            except UsageError as error:
                raise UsageError(f"{error}, or choose --trainer loop, which needs neither") from None
        yield progress
