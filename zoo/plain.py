"""Run a case in the loop most people write: backward, clip if asked, step, no checks. Shows what happens without the guard.

python -m zoo.plain vae_log_variance [--fixed]
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from zoo.registry import CASES, Training

FAMILIES = ("data", "forward", "backward", "optimizer", "rl", "system", "raised", "quiet", "algebra")


def load() -> None:
    for family in FAMILIES:
        if (Path(__file__).parent / f"{family}_cases.py").is_file():
            importlib.import_module(f"zoo.{family}_cases")


def steps(t: Training) -> Iterator[tuple[Tensor, float]]:
    """(loss, gradient norm before clipping) of every step, as it is taken."""
    for batch in t.batches:
        if not t.own_loop:
            t.optimizer.zero_grad()
        loss = t.loss_fn(t.model, batch)
        (t.scaler.scale(loss) if t.scaler else loss).backward()
        if t.scaler:
            t.scaler.unscale_(t.optimizer)
        norms = [p.grad.float().norm() for p in t.model.parameters() if p.grad is not None]
        norm = float(torch.stack(norms).norm()) if norms else math.nan
        if t.max_norm:
            torch.nn.utils.clip_grad_norm_(t.model.parameters(), t.max_norm)
        if t.scaler:
            t.scaler.step(t.optimizer)
            t.scaler.update()
        else:
            t.optimizer.step()
        if t.scheduler:
            t.scheduler.step()
        yield loss.detach(), norm


if __name__ == "__main__":
    load()
    case = CASES[sys.argv[1]].build("--fixed" in sys.argv)
    for step, (loss, norm) in enumerate(steps(case)):
        bad = sum(not torch.isfinite(p).all() for p in case.model.parameters())
        print(f"step={step} loss={float(loss):.5g} grad_norm={norm:.4g} bad_weights={bad}")
