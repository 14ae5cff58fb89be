"""docs/reference/cli.md: every command with its arguments, options and exit status, read from the command line itself.

`python -m tools.tables` writes it; a test fails when it differs. It walks the commands' own objects, so no terminal's width
matters.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from nanproof.cli import app

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "cli.md"
NOTE = "<!-- made by tools/tables.py from the command line; change src/nanproof/cli or nanproof_recipes/commands -->"
PAGES = {
    "check": "../explain.md#before-step-0",
    "replay": "../explain.md#bundles-and-nanproof-replay",
    "scan": "../scan.md",
    "run": "../frameworks/scripts.md",
    "doctor": "../doctor.md",
    "report": "../report.md",
    "watch": "../watch.md",
    "recipe weights": "../recipes/units-sft.md",
    **{
        f"recipe units-sft {name}": "../recipes/units-sft.md#the-commands" for name in ("data", "train", "test", "rft", "compare")
    },
    **{f"recipe latent-dlm {name}": "../recipes/latent-dlm.md#the-commands" for name in ("train", "eval", "sample", "compare")},
    **{f"recipe vlm-grpo {name}": "../recipes/vlm-grpo.md" for name in ("data", "sft", "train", "test", "smoke", "compare")},
}
HEAD = """`nanproof --help` and `nanproof COMMAND --help` say the same. `python -m nanproof` is the same command. Starting it
does not import torch; a command does that if it has to. What is found goes to standard output, notices and errors to standard
error. `--json`, where there is one, prints one JSON object; fields may be added to it."""


def commands(group: Any = None, before: str = "") -> dict[str, Any]:
    """What parses each command line, by name; those of a group have its name before theirs."""
    group = group if group is not None else typer.main.get_command(app)
    context = typer.Context(group)
    found: dict[str, Any] = {}
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        inside = commands(command, f"{before}{name} ") if hasattr(command, "commands") else {f"{before}{name}": command}
        found |= inside
    return found


def called(line: list[str]) -> tuple[Any, list[str]]:
    """The command that a line calls, None if it is only the beginning of one, and its arguments."""
    found = commands()
    for count in range(len(line), 0, -1):
        if (name := " ".join(line[:count])) in found:
            return found[name], line[count:]
    assert any(f"{known} ".startswith(" ".join(line) + " ") for known in found), f"no such command: nanproof {' '.join(line)}"
    return None, []


def page() -> str:
    group: Any = typer.main.get_command(app)
    found = commands()
    rows = [f"| [`nanproof {name}`](#nanproof-{name.replace(' ', '-')}) | {_short(command)} |" for name, command in found.items()]
    parts = ["# Command line", HEAD, "| command | |\n|---|---|\n" + "\n".join(rows)]
    own = [p for p in group.params if p.name != "help"]
    parts.append("| option of `nanproof` itself | |\n|---|---|\n" + "\n".join(_option(p, {}) for p in own))
    for name, command in found.items():
        parts += described(name, command)
    return "\n\n".join([*parts, NOTE]) + "\n"


def described(name: str, command: Any) -> Iterator[str]:
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and p.name != "help"]
    yield f"## nanproof {name}"
    usage = " ".join(["nanproof", name, *(["[OPTIONS]"] if options else []), *map(_usage, arguments)])
    yield f"```text\n{usage}\n```"
    body, status = _help(command)
    yield body + (f" [More]({PAGES[name]})." if name in PAGES else "")
    if arguments:
        said = [f"| `{_name(p)}` | {_text(p)} |" for p in arguments]
        yield "| argument | |\n|---|---|\n" + "\n".join(said)
    if options:
        kinds = get_type_hints(inspect.unwrap(command.callback), include_extras=True)
        yield "| option | |\n|---|---|\n" + "\n".join(_option(p, kinds) for p in options)
    if status:
        yield f"**Exit status.** {status}"


def _help(command: Any) -> tuple[str, str]:
    """What it does, and its exit status, which the docstring ends with."""
    said = " ".join(inspect.cleandoc(command.help or "").replace("\f", " ").split())
    body, status = (*re.split(r"Exit status:? ", said, maxsplit=1), "")[:2]
    return body.strip(), status[:1].upper() + status[1:]


def _short(command: Any) -> str:
    return _help(command)[0].split(". ")[0].rstrip(".") + "."


def _name(argument: Any) -> str:
    return (argument.metavar or argument.name).upper()


def _usage(argument: Any) -> str:
    name = _name(argument) + ("..." if argument.nargs == -1 else "")
    return name if argument.required else f"[{name}]"


def _text(param: Any) -> str:
    return " ".join((getattr(param, "help", None) or "").split()).replace("|", "\\|")


def _option(param: Any, kinds: dict[str, Any]) -> str:
    names = ", ".join(f"`{name}`" for name in (*param.opts, *param.secondary_opts))
    said, kind = _text(param), ""
    if not param.is_flag:
        kind = f" `{param.metavar or _kind(kinds[param.name])}`"
        info = next((x for x in get_args(kinds[param.name]) if hasattr(x, "min")), None)
        limits = [f"{word} {x}" for word, x in (("at least", info and info.min), ("at most", info and info.max)) if x is not None]
        said += f" ({' and '.join(limits)})" if limits else ""
        if param.default not in (None, [], ()) and not callable(param.default):
            said += f" Default: `{param.default}`."
    if param.required:
        said += " Required."
    return f"| {names}{kind} | {said} |"


def _kind(annotation: Any) -> str:
    """The word for a type, as a reader of a command line knows it."""
    text = str(get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation)
    if "Literal" in text:
        return "\\|".join(re.findall(r"'([\w-]+)'", text))
    return next((word for part, word in (("Path", "PATH"), ("float", "NUMBER"), ("int", "NUMBER")) if part in text), "TEXT")
