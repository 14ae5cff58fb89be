"""`nanproof check`: what can be told before step 0."""

from __future__ import annotations

import contextlib
import json
import sys
import traceback
from typing import TYPE_CHECKING, Annotated

import typer

from nanproof._errors import UsageError
from nanproof._text import shown
from nanproof._wording import rows
from nanproof.cli._entry import built
from nanproof.cli._shared import could_not_run, grid

if TYPE_CHECKING:
    from nanproof._preflight import Examined


def check(
    entry: Annotated[
        str,
        typer.Argument(
            help="module:function of yours that returns a dictionary of model, optimizer, loss_fn and batch (or batches), "
            "perhaps scaler, scheduler and accumulate; or of a Trainer, or a LightningModule.",
            show_default=False,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output instead.")] = False,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long it may take.")] = 60.0,
) -> None:
    """Look for what would go wrong before the first step. Exit status: 1 found something, 0 nothing, 2 could not run."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            examined = run(entry, seconds)
    except UsageError as error:
        raise could_not_run(error) from error
    except (Exception, SystemExit) as error:
        traceback.print_exc(file=sys.stderr)
        raise could_not_run(UsageError(f"{entry}: {type(error).__name__}: {error}. See above where it was raised")) from error
    found = examined.found
    if as_json:
        probes = [probe.to_json() for probe in examined.probes]
        data = {"v": 1, "entry": entry, "found": [d.to_json() for d in found], "probes": probes}
        typer.echo(json.dumps(data, allow_nan=False))
    else:
        from rich.console import Console

        console = Console(markup=False, highlight=False)
        if not found:
            console.print("nothing found in one batch, forward and backward")
        for probe in examined.probes:
            console.print(f"{'!' if probe.diagnosis else '-'} {shown(probe)}", soft_wrap=True)
        if found and examined.probes:
            console.print()
        for diagnosis in found:
            console.print(grid(rows(diagnosis)), "")
    raise typer.Exit(1 if found else 0)


def run(entry: str, seconds: float) -> Examined:
    from nanproof._preflight import examine

    made = built(entry, to_train=True)
    for name in ("optimizer", "batch"):
        if getattr(made, name) is None:
            raise UsageError(f"{entry}: it returns no '{name}'. A check needs model, optimizer, loss_fn and batch (or batches)")
    return examine(
        made.model,
        made.optimizer,
        made.batch,
        made.loss_fn,
        scaler=made.scaler,
        scheduler=made.scheduler,
        seconds=seconds,
        accumulate=made.accumulate,
    )
