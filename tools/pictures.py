"""Make the pictures of the README and the documents: `make pictures`.

Terminals are drawn as SVG, without a font from the network; pages are photographed in Chromium. Everything shown is what the
commands made of real runs.
"""

from __future__ import annotations

import io
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from nanproof.cli._demo import Result, documents, picture, train
from nanproof.cli._report import write
from tools.watched import runs, screen

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "images"


def svg(name: str, text: str) -> None:
    text = re.sub(r"@font-face \{.*?\}\s*", "", text, flags=re.DOTALL).replace("Fira Code,", "")
    (FOLDER / f"{name}.svg").write_text(text, encoding="utf-8")
    print(FOLDER / f"{name}.svg")


@contextmanager
def terminal(name: str, command: str) -> Iterator[Console]:
    console = Console(record=True, width=100, file=io.StringIO(), force_terminal=True, markup=False, highlight=False)
    console.print(Text(f"$ {command}", style="bold"))
    yield console
    svg(name, console.export_svg(title=command.split("|")[0].strip()))


def demo(folder: Path) -> None:
    """The end of the demo. Its guarded run stays in the folder, for the report."""
    unguarded, guarded = (train(documents(), 240, 0, each, lambda _loss: None) for each in (None, folder))
    shown = [replace(i, bundle=(i.bundle or "").replace(str(folder), "runs/demo") or None) for i in guarded.incidents]
    with terminal("demo", "nanproof demo") as console:
        told = Result(**{**vars(guarded), "incidents": shown})
        console.print(picture(unguarded, told, Path("runs/demo/report.html"), 100))


def doctor() -> None:
    """What three lines of a log tell: the example of the README."""
    from nanproof.cli._doctor import examine, show

    log = ROOT / "tests" / "logs" / "corpus" / "report_skipped_steps.log"
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        shutil.copy(log, "train.log")
        with terminal("doctor", "cat train.log; nanproof doctor train.log") as console:
            console.print(log.read_text().rstrip(), soft_wrap=True)
            show(console, list(examine(["train.log"])))


def report(folder: Path) -> None:
    """The page in light and dark, an incident's card, and on a phone."""
    from playwright.sync_api import sync_playwright

    page_of = write(folder)
    assert page_of is not None
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        wide, tall, phone = ({"width": w, "height": h} for w, h in ((1180, 860), (1180, 1340), (390, 780)))
        for name, scheme, size, at in (
            ("report", "light", tall, ""),
            ("report-dark", "dark", wide, ""),
            ("report-incident", "light", wide, "#incident-0"),
            ("report-phone", "light", phone, ""),
        ):
            page: Any = browser.new_page(viewport=size, color_scheme=scheme)
            page.goto(page_of.absolute().as_uri() + at)
            page.wait_for_timeout(400)
            page.screenshot(path=FOLDER / f"{name}.png")
            print(FOLDER / f"{name}.png")
        browser.close()


SCROLLED = {"vlm-grpo": 700}
"""Pixels below the legend, where the curves that matter are not the first."""


def compared() -> None:
    """The curves of the recipes' comparisons, as they were measured."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        for recipe in ("units-sft", "latent-dlm", "vlm-grpo"):
            page: Any = browser.new_page(viewport={"width": 1180, "height": 880}, color_scheme="light")
            page.goto((ROOT / "docs" / "recipes" / f"{recipe}-comparison.html").as_uri())
            page.wait_for_timeout(400)
            page.evaluate("document.getElementById('legend').scrollIntoView()")
            page.evaluate(f"window.scrollBy(0, {SCROLLED.get(recipe, 70)})")
            page.wait_for_timeout(200)
            page.screenshot(path=FOLDER / f"{recipe}.png")
            print(FOLDER / f"{recipe}.png")
        browser.close()


def scenes() -> None:
    """Scenes of vlm-grpo, each with what a right reply to it is."""
    from PIL import Image, ImageDraw

    from nanproof_recipes.vlm_grpo.data.scenes import SIDE, make

    scale, across, down, room = 6, 4, 2, 34
    side = SIDE * scale
    sheet = Image.new("RGB", (across * (side + 16) + 16, down * (side + room + 16) + 16), "white")
    pen = ImageDraw.Draw(sheet)
    for number, scene in enumerate(make(across * down, 0, seed=3)["train"]):
        x, y = 16 + number % across * (side + 16), 16 + number // across * (side + room + 16)
        sheet.paste(scene.picture().resize((side, side), Image.Resampling.NEAREST), (x, y))
        pen.text((x, y + side + 6), scene.answer, fill="black", font_size=13)
    sheet.save(FOLDER / "vlm-scenes.png")
    print(FOLDER / "vlm-scenes.png")


def watch() -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs(Path(folder))
        svg("watch", screen(Path(folder)))


if __name__ == "__main__":
    logging.getLogger("nanproof").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as place:
        kept = Path(place) / "runs" / "demo"
        demo(kept)
        report(kept)
    doctor()
    watch()
    compared()
    scenes()
