"""The picture of `nanproof watch`: the screen itself, over runs of the demo. `pictures.py` calls `screen`."""

from __future__ import annotations

import asyncio
import logging
import re
from pathlib import Path

from nanproof.cli._demo import documents, train
from nanproof.watch._app import WatchApp
from nanproof.watch._plot import FINE
from nanproof.watch._runs import Watched


def runs(folder: Path) -> None:
    """Two runs of the demo, guarded; the first is the newest. The same each time."""
    logging.getLogger("nanproof").setLevel(logging.ERROR)
    for name, steps, seed in (("baseline", 150, 1), ("lr-3e-3", 240, 0)):
        train(documents(), steps, seed, folder / name, lambda _loss: None)


def screen(folder: Path, size: tuple[int, int] = (100, 34)) -> str:
    """What the terminal shows of the runs in a folder, as SVG, without a font from the network."""

    async def shot() -> str:
        app = WatchApp(Watched([folder]), FINE, every=0.05)
        async with app.run_test(size=size) as pilot:
            while not app.watched.views or any(view.catching_up for view in app.watched.views.values()):
                await pilot.pause(0.05)
            await pilot.pause(0.2)
            return app.export_screenshot(title="nanproof watch runs")

    svg = asyncio.run(shot())
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL).replace("Fira Code,", "")


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as made:
        runs(Path(made))
        path = Path(__file__).parents[1] / "docs" / "images" / "watch.svg"
        path.write_text(screen(Path(made)), encoding="utf-8")
        print(path)
