"""`nanproof recipe units-sft`: a small language model learns unit conversion, in four arms."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanproof_recipes.commands.shared import Again, Arm, AsJson, Out, compared, finished, reporting_errors, show, working

if TYPE_CHECKING:
    from nanproof_recipes.units_sft.workshop import Workshop

units_sft = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="A small language model learns unit conversion: as it was reported broken, as people patched it, guarded, and fixed.",
)

Variant = Annotated[
    str, typer.Option(help="Of broken: double, prompt. Of patched: 000, 001, 002. Of guarded: tuned. Of fixed: reported.")
]
Model = Annotated[str, typer.Option(help="smollm2-135m, tiny, a folder, a .gguf file, or a hub name.")]
Train = Annotated[int, typer.Option("--train", min=1, help="Questions to train on.")]
Valid = Annotated[int, typer.Option("--valid", min=1, help="Held-out questions to ask.")]
Epochs = Annotated[int | None, typer.Option(help="Times over the data; 3 in every arm.", show_default=False)]
Rank = Annotated[int | None, typer.Option(help="Rank of LoRA; 4 in every arm.", show_default=False)]
Rate = Annotated[float | None, typer.Option(help="Learning rate; 2e-4 as reported, 4e-3 in fixed.", show_default=False)]
Batch = Annotated[int | None, typer.Option(help="Samples of a step; 32 as reported, 8 in fixed.", show_default=False)]
Seed = Annotated[int, typer.Option(help="Of adapters, order of the data and sampling.")]
Form = Annotated[str | None, typer.Option(help="How answers are written: bare, factor or worked.", show_default=False)]
Chosen = Annotated[str, typer.Option(help="Of fixed: auto, bf16, fp16 or fp32.")]
Wide = Annotated[bool, typer.Option("--use-fp32-for-training", help="The same as --precision fp32.")]
OUT = Path("runs/units-sft")
REAL = "smollm2-135m"


@units_sft.command()
def data(
    out: Out = OUT,
    train: Train = 1000,
    valid: Valid = 1000,
    seed: Annotated[int, typer.Option(help="Of the questions.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Make the questions: two sets that have none in common, the same for the same seed."""
    with reporting_errors():
        from nanproof_recipes.units_sft.data import questions

        made = questions.make(train, valid, seed)
        paths = questions.save_sets(out / "data", made)
        said = {
            **{name: str(path) for name, path in paths.items()},
            "questions": {"train": train, "valid": valid},
            "conversions": len({(q.of, q.to) for name in ("train", "valid") for q in made[name]}),
        }
        if as_json:
            typer.echo(json.dumps(said))
        else:
            typer.echo(f"{train} questions to train on: {said['train']}\n{valid} to be asked: {said['valid']}")
            for q in made["train"][:3]:
                typer.echo(f"  {q.text}  ->  {q.answer('worked')}")


@units_sft.command()
def train(
    arm: Arm = "fixed",
    variant: Variant = "",
    model: Model = REAL,
    precision: Chosen = "auto",
    use_fp32_for_training: Wide = False,
    epochs: Epochs = None,
    lr: Rate = None,
    batch: Batch = None,
    rank: Rank = None,
    form: Form = None,
    seed: Seed = 0,
    train: Train = 1000,
    valid: Valid = 1000,
    out: Out = OUT,
    again: Again = False,
    as_json: AsJson = False,
) -> None:
    """Train one arm and ask its model the held-out questions. Goes on where it was stopped.

    Exit status: 1 weights are not finite at the end, or training did not finish; 2 it could not run.
    """
    with reporting_errors():
        from nanproof_recipes.units_sft.arms import setting

        chosen = "fp32" if use_fp32_for_training else precision
        changes = {"epochs": epochs, "lr": lr, "batch": batch, "rank": rank, "form": form, "seed": seed, "precision": chosen}
        arm_setting = setting(arm, variant, **changes)
        with _workshop(out, model, train, valid) as workshop:
            result = workshop.arm(arm_setting, again=again)
        finished(result, as_json)


@units_sft.command("test")
def ask(
    arm: Annotated[str, typer.Option(help="An arm that was trained in --out, or unmodified.")] = "fixed",
    variant: Variant = "",
    model: Model = REAL,
    shots: Annotated[int, typer.Option(min=0, help="With unmodified: questions and answers given before each question.")] = 0,
    train: Train = 1000,
    valid: Valid = 1000,
    out: Out = OUT,
    as_json: AsJson = False,
) -> None:
    """Ask a model the held-out questions and score what it says."""
    with reporting_errors():
        name = f"{arm}-{variant}" if variant else arm
        with _workshop(out, model, train, valid) as workshop:
            result = workshop.unmodified(shots) if arm == "unmodified" else workshop.test(name)
        show(result, as_json)


@units_sft.command()
def rft(
    model: Model = REAL,
    more: Annotated[int, typer.Option(min=1, help="New questions to draw answers for.")] = 2000,
    samples: Annotated[int, typer.Option(min=1, help="Answers drawn for each question.")] = 4,
    temperature: Annotated[float, typer.Option(help="Of the drawing.")] = 0.8,
    keep: Annotated[int, typer.Option(min=1, help="Different right answers kept for each question.")] = 1,
    epochs: Epochs = None,
    lr: Rate = None,
    batch: Batch = None,
    seed: Seed = 0,
    train: Train = 1000,
    valid: Valid = 1000,
    out: Out = OUT,
    again: Again = False,
    as_json: AsJson = False,
) -> None:
    """Rejection sampling: draw answers from the model of `fixed`, keep the right ones, and train on with them."""
    with reporting_errors():
        with _workshop(out, model, train, valid) as workshop:
            from nanproof_recipes.units_sft.arms import RFT, changed
            from nanproof_recipes.units_sft.comparing import rft as run
            from nanproof_recipes.units_sft.rejection import Sampling

            sampling = Sampling(more=more, samples=samples, temperature=temperature, keep=keep)
            result = run(workshop, changed(RFT, epochs=epochs, lr=lr, batch=batch, seed=seed), sampling, again)
        show(result, as_json)


@units_sft.command()
def compare(
    model: Model = REAL,
    epochs: Epochs = None,
    rank: Rank = None,
    form: Form = None,
    seed: Seed = 0,
    train: Train = 1000,
    valid: Valid = 1000,
    more: Annotated[int, typer.Option(min=1, help="New questions for rejection sampling.")] = 2000,
    without_rft: Annotated[bool, typer.Option("--without-rft", help="Leave rejection sampling out.")] = False,
    out: Out = OUT,
    as_json: AsJson = False,
) -> None:
    """Run every arm and write one table and one page. Arms that are done already are taken as they are.

    Exit status: 1 something that the recipe claims was not seen, 2 it could not run.
    """
    with reporting_errors():
        with _workshop(out, model, train, valid) as workshop:
            from nanproof_recipes.units_sft.comparing import compare as run
            from nanproof_recipes.units_sft.rejection import Sampling

            changes = {"epochs": epochs, "rank": rank, "form": form, "seed": seed}
            found = run(workshop, changes, Sampling(more=more), with_rft=not without_rft)
        compared(found, out, as_json)


@contextmanager
def _workshop(out: Path, model: str, train: int, valid: int) -> Iterator[Workshop]:
    with working("transformers", "peft", "accelerate") as progress:
        from nanproof_recipes.units_sft.workshop import Workshop

        yield Workshop(out, model, train=train, valid=valid, progress=progress)
