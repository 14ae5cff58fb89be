"""Make the pictures of the README: `make pictures`. Each is what the terminal shows, as SVG, without a font from the network."""

from __future__ import annotations

import io
import re
import tempfile
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.text import Text

from nanproof.cli.demo import documents, picture, train

FOLDER = Path(__file__).parent


def save(console: Console, name: str, title: str) -> None:
    svg = console.export_svg(title=title)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code,", "")
    path = FOLDER / f"{name}.svg"
    path.write_text(svg)
    print(path)


def demo() -> None:
    text = documents()
    with tempfile.TemporaryDirectory() as folder:
        runs = [train(text, 240, 0, Path(folder) if guarded else None, lambda _loss: None) for guarded in (False, True)]
        guarded_run = runs[1]
        shown = [replace(i, bundle=(i.bundle or "").replace(folder, "runs/demo") or None) for i in guarded_run.incidents]
        guarded_run.incidents = shown
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True)
    console.print(Text("$ nanproof demo", style="bold"))
    console.print(picture(runs[0], runs[1], Path("runs/demo"), 100))
    save(console, "demo", "nanproof demo")


if __name__ == "__main__":
    demo()
