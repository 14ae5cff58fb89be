"""What nanproof and three other tools say about every case of the zoo: writes results/zoo.json and fills docs/zoo.md.

make zoo        # about three minutes on two cores
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import multiprocessing
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch

from tools.tables import fill_documents, zoo_summary
from zoo.guarded import run as guarded
from zoo.plain import load, steps
from zoo.registry import CASES, Case, Training

ROOT = Path(__file__).parents[1]

Said = tuple[int, str]
"""(step, text) of a tool that stopped the run."""


def loop(t: Training, watch: Callable[[int, torch.Tensor], None] = lambda *_: None) -> Said | None:
    """A plain loop that stops at the first exception, and what that was."""
    taken = 0
    try:
        for loss, _ in steps(t):
            watch(taken, loss)
            taken += 1
    except Exception as error:
        return taken, f"{type(error).__name__}: {error}"
    return None


def with_anomaly_mode(t: Training) -> Said | None:
    with torch.autograd.set_detect_anomaly(True):
        said = loop(t)
    return said if said is not None and "returned nan values" in said[1] else None


def with_debug_hooks(t: Training) -> Said | None:
    from transformers.debug_utils import DebugUnderflowOverflow

    DebugUnderflowOverflow(t.model)
    said = loop(t)
    return said if said is not None and "inf/nan" in said[1] else None


def with_spike_detection(t: Training) -> Said | None:
    from lightning.fabric import Fabric
    from lightning.fabric.utilities.spike import SpikeDetection

    with tempfile.TemporaryDirectory() as folder:
        fabric = Fabric(accelerator="cpu", devices=1)
        detector = SpikeDetection(exclude_batches_path=folder)
        said = loop(t, lambda step, loss: detector.on_train_batch_end(fabric, loss.float(), None, step))
    return said if said is not None and "Training spike" in said[1] else None


OTHERS = {
    "detect_anomaly": with_anomaly_mode,
    "DebugUnderflowOverflow": with_debug_hooks,
    "SpikeDetection": with_spike_detection,
}


def judge(case: Case) -> dict[str, Any]:
    """Marks for one case: True, False, or None where the question does not arise."""
    marks: dict[str, Any] = {}
    told = guarded(case.build(False)) if case.cause != "benign" else None
    first = told.first if told else None
    d = first.diagnosis if first else None
    marks["nanproof"] = {
        "detected": first is not None,
        "step": None if case.step is None else first is not None and first.step == case.step,
        "operation": None if case.op is None else bool(d and d.op and case.op in d.op),
        "sample": None if case.sample is None else bool(d and d.samples == (case.sample,)),
        "cause": bool(d and d.cause in (case.cause, *case.also)),
        "fix verified": bool(d and d.cause in (case.cause, *case.also) and d.verified),
        "quiet": not guarded(case.build(True)).incidents,
        "said": d.cause if d else None,
    }
    for name, tool in OTHERS.items():
        said = tool(case.build(False)) if case.cause != "benign" else None
        op = re.search(r"Function '(\w+?)Backward", said[1]) if said else None
        named = bool(op and case.op and case.op.replace("_", "") in op.group(1).lower())
        marks[name] = {
            "detected": said is not None,
            "step": None if case.step is None else said is not None and said[0] == case.step,
            "operation": None if case.op is None else named,
            "sample": None if case.sample is None else False,
            "cause": False,
            "fix verified": False,
            "quiet": tool(case.build(True)) is None,
            "said": None if said is None else said[1].splitlines()[0][:80],
        }
    return marks


def one(name: str) -> tuple[str, dict[str, Any], float]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        marks = judge(CASES[name])
    return name, marks, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    load()
    names = [n for n in CASES if not args.only or n in args.only]
    with multiprocessing.get_context("fork").Pool(args.processes) as pool:
        done = {}
        for name, marks, seconds in pool.imap_unordered(one, names):
            done[name] = marks
            n = marks["nanproof"]
            print(f"{len(done):3} {name}: {n['said']} ({seconds:.1f} s)", file=sys.stderr)
    cases = [{"name": n, "cause": CASES[n].cause, "marks": done[n]} for n in names]
    versions = {m: __import__(m).__version__ for m in ("torch", "transformers", "lightning")}
    results = {"date": date.today().isoformat(), "versions": versions, "cases": cases}
    print(zoo_summary(results))
    if not args.only:
        (ROOT / "benchmarks" / "results" / "zoo.json").write_text(json.dumps(results, indent=1) + "\n")
        fill_documents()
    misses = [c["name"] for c in cases if c["cause"] != "benign" and not c["marks"]["nanproof"]["cause"]]
    if misses:
        print("missed:", ", ".join(misses), file=sys.stderr)


if __name__ == "__main__":
    main()
