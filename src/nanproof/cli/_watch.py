"""`nanproof watch`: a run looked at while it is under way."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from nanproof._errors import UsageError
from nanproof.cli._shared import could_not_run

if TYPE_CHECKING:
    from nanproof.watch._plot import Marks
    from nanproof.watch._runs import Watched


def watch(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN", help="The run_dir of a guard, or a folder of such; it may not be there yet.", show_default=False
        ),
    ],
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of a screen, until the runs have ended.")] = False,
    once: Annotated[bool, typer.Option("--once", help="Print the state now, and end.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="The state now, one JSON object a run, and end.")] = False,
    web: Annotated[bool, typer.Option("--web", help="Serve the live report to a browser on this machine.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --web: the port; 0 is any that is free.")] = 0,
    open_browser: Annotated[bool, typer.Option("--open", help="With --web: open the browser.")] = False,
    every: Annotated[float, typer.Option(min=1.0, help="With --plain: seconds between lines on where it stands.")] = 30.0,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Draw with ASCII characters only.")] = False,
) -> None:
    """Watch runs while they train. Curves, incidents with cause and fix, and forecasts, as they are written.

    Reads the folder only; the run is not touched. Without a terminal it prints lines, as with --plain. Ctrl-C ends it, with exit
    status 0. Exit status 2: an option or a folder is wrong, or something is not installed.
    """
    from nanproof.watch._plot import ASCII, marks_for
    from nanproof.watch._runs import Watched

    try:
        if web and (plain or once or as_json):
            raise UsageError("--web serves pages and prints nothing else. Leave out --plain, --once and --json")
        if (port or open_browser) and not web:
            raise UsageError("--port and --open are for --web. Add it, or leave them out")
        watched = Watched([_folder(path) for path in runs])
        marks = ASCII if ascii_only else marks_for(sys.stdout.encoding, os.environ.get("TERM", ""))
        if once or as_json:
            _state(watched, marks, as_json)
        elif web:
            _web(watched, port, open_browser)
        elif plain or not _screen():
            _plain(watched, marks, every)
        else:
            _app(watched, ASCII if ascii_only else marks_for(_screen_encoding(), os.environ.get("TERM", "")))
    except UsageError as error:
        raise could_not_run(error) from error
    except KeyboardInterrupt:
        pass
    except BrokenPipeError:  # `| head` has seen enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def _folder(path: Path) -> Path:
    """The folder of a run, also where a file in it is named."""
    if path.name.endswith(".jsonl") and path.is_file():
        return path.parent
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file. Give the run_dir of a guard, the folder with steps.jsonl")
    return path


def _screen() -> bool:
    """Whether there is a terminal that can show one: the screen is drawn on standard error, and keys come from standard input."""
    tty = all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    return tty and os.environ.get("TERM") != "dumb"


def _screen_encoding() -> str | None:
    stream = sys.__stdout__ if os.name == "nt" else sys.__stderr__
    return None if stream is None else stream.encoding


def _put(line: str) -> None:
    print(line, flush=True)


def _state(watched: Watched, marks: Marks, as_json: bool) -> None:
    from nanproof.watch import _plain as plain

    plain.caught_up(watched)
    if watched.waiting:
        missing = watched.waiting[0]
        what = "no steps.jsonl in it, nor in folders below it" if missing.exists() else "it does not exist"
        raise UsageError(f"{missing}: {what}. Give the run_dir of a guard")
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 100
    for line in plain.as_json(watched) if as_json else plain.now(watched, columns, marks):
        _put(line)


def _plain(watched: Watched, marks: Marks, every: float) -> None:
    from nanproof.watch._plain import Lines

    Lines(watched, _put, marks, every=every).run()


def _app(watched: Watched, marks: Marks) -> None:
    try:
        from nanproof.watch._app import WatchApp
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "textual":
            raise
        raise UsageError(
            "the screen needs textual, which is not installed. "
            "pip install textual (the extra is nanproof[watch]), or add --plain or --web"
        ) from error
    app = WatchApp(watched, marks)
    app.run(mouse=False)
    if app.failure is not None:
        raise app.failure


def _web(watched: Watched, port: int, open_browser: bool) -> None:
    from nanproof.watch._serve import ADDRESS, Server
    from nanproof.watch._web import Site, report_pages

    with Server(Site(watched, report_pages()), port) as server:
        _put(server.url)
        _put(f"From elsewhere: ssh -L {server.port}:{ADDRESS}:{server.port} HOST, with this machine as HOST, then open it there.")
        _put("The address is as good as a password. Ctrl-C ends this; the run goes on.")
        if open_browser:
            threading.Thread(target=webbrowser.open, args=(server.url_once,), daemon=True).start()
        server.serve_forever()
