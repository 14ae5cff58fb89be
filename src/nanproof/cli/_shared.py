"""What all commands share: errors with a hint, output that any console can show, a diagnosis as a table."""

from __future__ import annotations

import difflib
import io
import os
import re
import sys
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from nanproof._errors import UsageError
from nanproof._text import one_line, shown
from nanproof._wording import Row

if TYPE_CHECKING:
    from rich.console import RenderableType


class Commands(TyperGroup):
    """The commands; a wrong call is told as `error:` and `hint:`, as every other error is."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        tolerate_poor_consoles()
        # torch says so where NumPy is not installed; nothing here needs it.
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")
        called = (args, prog_name, complete_var, False, windows_expand_args)
        if not standalone_mode:
            return super().main(*called, **extra)
        try:
            code = super().main(*called, **extra)
        except (KeyboardInterrupt, typer.Abort):
            sys.exit(130)
        except BrokenPipeError:  # `nanproof scan ... | head`
            _let_go_of_stdout()
            sys.exit(0)
        except Exception as error:
            if type(error).__name__ == "NoArgsIsHelpError" or not hasattr(error, "format_message"):
                if hasattr(error, "show"):
                    error.show()
                    sys.exit(2)
                raise
            self._tell(error)
            sys.exit(2)
        sys.exit(code if isinstance(code, int) else 0)

    def _tell(self, error: Any) -> None:
        """Click's errors have a message and, mostly, the context they came from."""
        message = one_line(re.sub(r"\.? Did you mean .*", "", error.format_message().replace("\n", " ")).rstrip("."))
        typer.echo(f"error: {message}", err=True)
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "nanproof"
        wrong = re.fullmatch(r"No such command '(.*?)'.*", message)
        known = context.command.list_commands(context) if wrong and context is not None else []
        near = difflib.get_close_matches(wrong[1], known, n=1) if wrong else []
        typer.echo(f"hint: {f'did you mean `{path} {near[0]}`?' if near else f'`{path} --help` shows what it takes'}", err=True)


def tolerate_poor_consoles() -> None:
    """A character that the console does not know is written out (\\u2713) instead of ending the command."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def _let_go_of_stdout() -> None:
    """Python flushes it at exit, and would say that the pipe is broken."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())


def could_not_run(error: UsageError) -> typer.Exit:
    """Say what was wrong and what to do, on standard error; exit status 2."""
    what, _, hint = shown(error, 4000).rpartition(". ")
    typer.echo(f"error: {what or hint}", err=True)
    if what:
        typer.echo(f"hint: {hint}", err=True)
    return typer.Exit(2)


def grid(found: Iterable[Row]) -> RenderableType:
    """The rows in two columns."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for heading, text in found:
        if text:
            table.add_row(heading, Text(shown(text)))
    return table
