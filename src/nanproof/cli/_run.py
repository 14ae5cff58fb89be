"""`nanproof run`: a training script, unchanged, protected."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from nanproof._errors import UsageError
from nanproof._policy import Policy
from nanproof.cli._shared import could_not_run

_IN_A_FILE = 130
"""Columns of a line that goes to no terminal."""


def run(
    script: Annotated[
        str, typer.Argument(help="The script, or with -m the module; what follows is its own.", show_default=False)
    ],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARGS", show_default=False)] = None,
    module: Annotated[bool, typer.Option("-m", help="Run a module, as `python -m` does.")] = False,
    run_dir: Annotated[
        Path | None, typer.Option(help="Folder for records, incidents and bundles; none are written without.", show_default=False)
    ] = None,
    max_skips: Annotated[int, typer.Option(min=0, help="Refused steps in a row that are tolerated.")] = 10,
    snapshot_every: Annotated[int, typer.Option(min=0, help="Steps between copies of the state, to go back to; 0: none.")] = 0,
    at_cap: Annotated[str, typer.Option(help="When too many steps were refused: rollback or halt.")] = "rollback",
    on_spike: Annotated[str, typer.Option(help="A finite spike: clip (as the script does), skip or record.")] = "clip",
    diagnose: Annotated[
        str, typer.Option(help="Which incidents are diagnosed: new (unlike those diagnosed before), always or never.")
    ] = Policy().diagnose,
    no_diagnose: Annotated[bool, typer.Option("--no-diagnose", help="The same as --diagnose never.")] = False,
    observe: Annotated[
        bool, typer.Option("--observe", help="Look at activations, weights and attention too, and warn of what is on its way.")
    ] = False,
    optimizer: Annotated[
        str, typer.Option(help="Form of an optimizer that left it open: own, fused, or auto (own on CPU, fused elsewhere).")
    ] = "auto",
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Any other field of Policy; may be repeated.", show_default=False),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one JSON object, as the last line on stderr.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary and no notices; incidents are still told.")] = False,
) -> None:
    """Run a training script unchanged, its optimizers guarded. A bad step never reaches the weights.

    Exit status: that of the script, as Python gives it; 1 also when training was halted; 2 when an option is wrong, the script
    is not there, or --run-dir cannot be written: then it was not started.
    """
    try:
        from nanproof.integrations.script._autorun import autorun
        from nanproof.integrations.script._session import Options

        asked = {
            "max_consecutive_skips": max_skips,
            "snapshot_every": snapshot_every,
            "at_cap": at_cap,
            "on_spike": on_spike,
            "diagnose": "never" if no_diagnose else diagnose,
            **_fields(policy or []),
        }
        options = Options(Policy(**asked), run_dir, _form(optimizer), quiet, observe)
        status, summary = autorun(script, args or [], module=module, options=options)
    except UsageError as error:
        raise could_not_run(error) from error
    sys.stdout.flush()
    if summary.rank == 0 and as_json:
        print(json.dumps(summary.to_json(), allow_nan=False), file=sys.stderr, flush=True)
    elif summary.rank == 0 and not quiet:
        for line in summary.wrapped(_width()):
            print(line, file=sys.stderr, flush=True)
    sys.exit(status)


def _width() -> int:
    """Columns of the terminal that standard error goes to; in a file lines are longer. COLUMNS, if set, counts."""
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError):  # no terminal, or no file at all
        columns = _IN_A_FILE
    asked = os.environ.get("COLUMNS", "")
    return int(asked) if asked.isdecimal() else columns or _IN_A_FILE


def _form(name: str) -> Literal["auto", "own", "fused"]:
    forms: dict[str, Literal["auto", "own", "fused"]] = {"auto": "auto", "own": "own", "fused": "fused"}
    if name in forms:
        return forms[name]
    raise UsageError(f"--optimizer {name} is unknown. Choose auto, own or fused")


def _fields(pairs: list[str]) -> dict[str, Any]:
    """KEY=VALUE as fields of Policy: values are numbers, true, false, none, or words."""
    known = {field.name for field in fields(Policy)}
    found: dict[str, Any] = {}
    for pair in pairs:
        key, sign, value = pair.partition("=")
        if not sign or key not in known:
            raise UsageError(f"--policy {pair}: no field of Policy. Write KEY=VALUE with one of {', '.join(sorted(known))}")
        found[key] = _value(value)
    return found


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
