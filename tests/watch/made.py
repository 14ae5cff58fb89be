"""Runs to watch, written by a real guard, and a look at what the screen shows."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

import torch

import nanproof
from toys import batches, mse, net, poison

BAD = (7, 20)
"""Steps whose batch has a NaN in it."""


def guard_in(folder: Path, **settings) -> nanproof.Guard:
    torch.manual_seed(0)
    model = net(dropout=0.0, batch_norm=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return nanproof.Guard(model, optimizer, loss_fn=mse, run_dir=folder, **settings)


def train(guard: nanproof.Guard, first: int, last: int, bad=BAD) -> None:
    """Steps `first` to `last`, the last not among them; all of them are on the disk afterwards."""
    level = logging.getLogger("nanproof").level
    logging.getLogger("nanproof").setLevel(logging.CRITICAL)
    for step, batch in enumerate(batches(last)[first:], first):
        guard.train_step(poison(batch) if step in bad else batch)
    guard.sync()
    guard.engine.tell.flush()
    logging.getLogger("nanproof").setLevel(level)


def run(folder: Path, steps: int = 40, **settings) -> Path:
    """A run that ended."""
    guard = guard_in(folder, **settings)
    train(guard, 0, steps)
    guard.close()
    return folder


def until(what, seconds: float = 10.0):
    """Wait for it; its value."""
    end = time.monotonic() + seconds
    while not (found := what()) and time.monotonic() < end:
        time.sleep(0.01)
    assert found
    return found


def lines(widget) -> list[str]:
    """What a part of the screen shows."""
    return [widget.render_line(y).text.rstrip() for y in range(widget.size.height)]


def shown(app) -> str:
    """What the whole screen shows, part by part; of a card, if one is open, only the card."""
    from nanproof.watch._widgets import Drawn

    return "\n".join(line for widget in app.screen.query(Drawn) if widget.display for line in lines(widget))


def drive(app, act, size=(80, 24)):
    """Run the app without a terminal, let `act(pilot, wait)` press keys; `wait(condition)` waits until something is so."""

    async def go():
        async with app.run_test(size=size) as pilot:

            async def wait(condition):
                for _ in range(500):
                    await pilot.pause()
                    if condition():
                        await pilot.pause()
                        return
                    await asyncio.sleep(0.01)
                raise AssertionError(shown(app))

            await act(pilot, wait)

    asyncio.run(go())
    assert app.failure is None
