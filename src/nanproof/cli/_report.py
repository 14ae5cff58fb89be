"""`nanproof report`: a run as one HTML file, as text for an issue, or as data."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from nanproof._errors import UsageError
from nanproof._text import shown
from nanproof.cli._shared import could_not_run


def report(
    run: Annotated[Path, typer.Argument(help="The run_dir of a guard, or the output folder of a trainer.", show_default=False)],
    out: Annotated[
        str | None,
        typer.Option(
            help="The file to write; - is standard output. Default: report.html in the run's folder.", show_default=False
        ),
    ] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Text for an issue instead; on standard output unless --out names a file.")
    ] = False,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="What the page shows, as one JSON object; on standard output unless --out names a file."),
    ] = False,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="tokenizer.json, or its folder, to show token ids as text. Default: the run's own.", show_default=False
        ),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write a run as one HTML file, as text for an issue, or as JSON. The file needs no network. Exit status: 0 written, 2 could
    not."""
    try:
        if as_markdown and as_json:
            raise UsageError("--markdown and --json are two forms of one report. Leave out one of them")
        path = write(run, out, "markdown" if as_markdown else "json" if as_json else "html", tokenizer)
    except UsageError as error:
        raise could_not_run(error) from error
    if path is None:
        return
    encoding = sys.stdout.encoding or "utf-8"
    typer.echo(shown(str(path), 4000).encode(encoding, "backslashreplace").decode(encoding))
    if open_it:
        import webbrowser

        webbrowser.open(path.absolute().as_uri())


def write(folder: Path, out: str | None = None, form: str = "html", tokenizer: Path | None = None) -> Path | None:
    """Read the run, write the report ("html", "markdown" or "json"), say where; None for standard output."""
    from nanproof.report._html import PAGE, data, page
    from nanproof.report._markdown import markdown
    from nanproof.report._out import put
    from nanproof.report.folder._run import Run, one_run
    from nanproof.report.folder._tokens import find

    found = one_run(folder)
    tokens = find(found, tokenizer)
    run = Run(found).read()
    if form == "json":
        text = json.dumps(data(run, tokens), allow_nan=False, separators=(",", ":")) + "\n"
    else:
        text = markdown(run) if form == "markdown" else page(run, tokens=tokens)
    if out == "-" or (out is None and form != "html"):
        _to_stdout(text)
        return None
    path = found / PAGE if out is None else Path(out)
    try:
        put(path, text, found)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}. Name another file with --out") from error
    return path


def _to_stdout(text: str) -> None:
    """As UTF-8 whatever the console is set to: the page says so in its head."""
    with suppress(BrokenPipeError):
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.buffer.flush()
