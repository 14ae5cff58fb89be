"""`nanproof report`: a run as one HTML file, or as text for an issue."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from nanproof.cli.entry import could_not_run
from nanproof.core.files import reason
from nanproof.errors import UsageError
from nanproof.report.shown import shown

NAMES = {"html": "report.html", "markdown": "report.md"}


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
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            help="tokenizer.json, or its folder, to show token ids as text. Default: the run's own.", show_default=False
        ),
    ] = None,
    open_it: Annotated[bool, typer.Option("--open", help="Show it in the browser.")] = False,
) -> None:
    """Write a run as one HTML file, or as text for an issue. The file needs no network. Exit status: 0 written, 2 could not."""
    try:
        path = write(run, out or ("-" if as_markdown else None), as_markdown, tokenizer)
    except UsageError as error:
        raise could_not_run(UsageError(shown(str(error), 4000))) from error
    if path is None:
        return
    encoding = sys.stdout.encoding or "utf-8"
    typer.echo(shown(str(path), 4000).encode(encoding, "backslashreplace").decode(encoding))
    if open_it:
        import webbrowser

        webbrowser.open(path.absolute().as_uri())


def write(folder: Path, out: str | None = None, as_markdown: bool = False, tokenizer: Path | None = None) -> Path | None:
    """Read the run, write the report, say where; None for standard output."""
    from nanproof.report.html import page
    from nanproof.report.markdown import markdown
    from nanproof.report.run import Run, one_run
    from nanproof.report.tokens import find

    found = one_run(folder)
    tokens = find(found, tokenizer)
    run = Run(found).read()
    text = markdown(run) if as_markdown else page(run, tokens=tokens)
    if out == "-":
        _to_stdout(text)
        return None
    path = found / NAMES["markdown" if as_markdown else "html"] if out is None else Path(out)
    try:
        _write_whole(path, text)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {reason(error)}. Name another file with --out") from error
    return path


def _to_stdout(text: str) -> None:
    """As UTF-8 whatever the console is set to: the page says so in its head."""
    with suppress(BrokenPipeError):
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.buffer.flush()


def _write_whole(path: Path, text: str) -> None:
    """There with all of its text, or as it was before."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8", newline="\n")
        os.replace(partial, path)
    except BaseException:
        with suppress(OSError):
            partial.unlink()
        raise
