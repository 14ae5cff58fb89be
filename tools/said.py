"""What is seen of every case of the zoo: in the log of a plain loop, under `guard.train_step`, and under `guard.step` alone.

The pages of causes (docs/causes) quote it. `python -m tools.said` writes results/said.json, in half a minute on two cores;
`python -m tools.tables` makes the pages from it. Nothing in it is written by hand.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import math
import multiprocessing
import re
import warnings
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nanproof
from nanproof import Incident
from nanproof._records import encode
from tools.results import RESULTS
from zoo.guarded import run as guarded
from zoo.plain import load, steps
from zoo.registry import CASES, Training
from zoo.two_ranks import two_ranks

ROOT = Path(__file__).parents[1]

SHOWN = 160
"""Characters of an error that are kept."""


def logged(t: Training, at: int | None) -> dict[str, Any]:
    """A plain loop: some lines of its log, when it went bad, and how it ended. `at` is the step of the incident."""
    seen: list[tuple[float, float]] = []
    error = None
    try:
        for loss, norm in steps(t):
            seen.append((float(loss), norm))
    except Exception as raised:
        error = relative(f"{type(raised).__name__}: {raised}").splitlines()[0][:SHOWN]
    parameters, buffers = list(t.model.parameters()), [b for b in t.model.buffers() if b.is_floating_point()]
    return {
        "steps": len(seen),
        "log": [[i, encode(seen[i][0]), encode(seen[i][1])] for i in lines(seen, at)],
        "bad_loss": [i for i, (loss, _) in enumerate(seen) if not math.isfinite(loss)][:2],
        "bad_norm": [i for i, (_, norm) in enumerate(seen) if not math.isfinite(norm)][:2],
        "first": encode(seen[0][0]) if seen else None,
        "last": encode(seen[-1][0]) if seen else None,
        "error": error,
        "weights": [sum(not torch.isfinite(p).all() for p in parameters), len(parameters)],
        "buffers": [sum(not torch.isfinite(b).all() for b in buffers), len(buffers)],
    }


def lines(seen: list[tuple[float, float]], at: int | None) -> list[int]:
    """Which steps to show: those around the trouble, or a few over the whole run where it has no date."""
    if not seen:
        return []
    bad = [i for i, both in enumerate(seen) if not all(map(math.isfinite, both))]
    start = bad[0] if bad else at
    if start is None or (not bad and start < 3):
        return sorted({0, 1, *(round(x * (len(seen) - 1) / 4) for x in range(1, 5))})
    return [i for i in range(start - 2, start + 4) if 0 <= i < len(seen)]


def told(incident: Incident | None) -> dict[str, Any] | None:
    """The first incident, without what differs from machine to machine."""
    if incident is None:
        return None
    d = incident.diagnosis
    found: dict[str, Any] = {
        "said": str(incident).replace(incident.message, relative(incident.message)),
        "kind": incident.kind,
        "step": incident.step,
    }
    if d is not None:
        where, source = (None if x is None else relative(x) for x in (d.where, d.source))
        d = replace(d, where=where, source=source, evidence=tuple(map(relative, d.evidence)))
        found["diagnosis"] = d.to_json()
    return found


def relative(text: str) -> str:
    """Paths as a reader of the repository knows them."""
    text = text.replace(f"{ROOT}/", "")
    return re.sub(r"/\S*?/(?:site|dist)-packages/", "", text)


def one(name: str) -> tuple[str, dict[str, Any]]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    case = CASES[name]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        full = guarded(case.build(False)).first
        mine = case.build(False)
        alone = full if mine.own_loop else own_loop(mine)
        plain = logged(case.build(False), full.step if full else None)
    by_step = alone.diagnosis.cause if alone is not None and alone.diagnosis is not None else None
    return name, {
        "cause": case.cause,
        "plain": plain,
        "told": told(full),
        "by_step": {"kind": alone.kind if alone else None, "cause": by_step},
    }


def own_loop(t: Training) -> Incident | None:
    """The same under `guard.step` in a loop of the user's own, where the step cannot be run again."""
    guard = nanproof.Guard(t.model, t.optimizer, max_norm=t.max_norm, scaler=t.scaler)
    with contextlib.suppress(Exception):
        for batch in t.batches:
            t.optimizer.zero_grad()
            loss = t.loss_fn(t.model, batch)
            guard.backward(loss)
            guard.step(loss)
            if t.scheduler:
                t.scheduler.step()
    with contextlib.suppress(Exception):
        guard.close()
    return guard.incidents[0] if guard.incidents else None


def one_rank(rank: int) -> dict[str, Any] | None:
    """Two ranks of DistributedDataParallel; a sample of rank 1 has a feature that was computed as 0/0."""
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1))
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + rank)
    batches = [(torch.randn(8, 6), torch.randn(8, 1)) for _ in range(8)]
    if rank == 1:
        batches[4][0][3, 2] = math.nan
    with nanproof.Guard(model, optimizer, loss_fn=lambda m, b: (m(b[0]) - b[1]).square().mean()) as guard:
        for batch in batches:
            guard.train_step(batch)
    return told(guard.incidents[0])


def main() -> None:
    load()
    names = [name for name, case in CASES.items() if case.cause != "benign"]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        done = dict(pool.imap_unordered(one, names))
    [(_, second)] = two_ranks(("tools.said:one_rank", (), {}))
    results = {
        "date": date.today().isoformat(),
        "versions": {module: __import__(module).__version__ for module in ("torch", "transformers")},
        "cases": {name: done[name] for name in names},
        "one_rank": second,
    }
    RESULTS.joinpath("said.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
