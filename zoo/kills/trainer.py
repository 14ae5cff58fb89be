"""Kill a protected Trainer of transformers hundreds of times: does it always resume, and end as if nothing had happened?

python -m zoo.kills.trainer --kills 300 --terms 100

Runs that save at every step, and at every tenth, are killed with SIGKILL at random moments and inside their saves, and started
again until they are through. Others get SIGTERM and a grace period. The truth comes from elsewhere: a few lines here load every
checkpoint on the disk, and an undisturbed run says what weights, optimizer and schedule must be at every step, bit for bit.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by the first optimizer otherwise, in every life
from safetensors.torch import load_file
from transformers.trainer_pt_utils import safe_globals

from zoo.kills.campaign import Child, Tally, table
from zoo.kills.trainer_worker import STEP, TrainerSpec, digest, life, reference
from zoo.kills.worker import PHASES, Board, Plan

GRACE = 30.0
"""Seconds from SIGTERM to SIGKILL, as Slurm and Kubernetes give by default."""
KILLS_A_RUN = 15
"""After so many the run is left in peace."""


@dataclass
class Resumes(Tally):
    """What the kills of a Trainer came to."""

    partial: int = 0
    """Kills that left a newest folder that is not whole."""
    failed: int = 0
    """Starts that did not resume though there was a whole checkpoint, or died."""
    steps_lost: int = 0
    """Steps that had to be taken again."""
    left: int = 0
    """Runs that saved on SIGTERM and ended by themselves with status 0."""

    @property
    def fine(self) -> bool:
        return super().fine and not self.failed


def whole_on_disk(folder: Path, truth: dict[int, int]) -> dict[int, bool]:
    """The step of every checkpoint that can be loaded and holds the state of its step; and whether its save was finished."""
    found = {}
    for path in folder.glob("checkpoint-*"):
        try:
            step = int(json.loads((path / "trainer_state.json").read_text())["global_step"])
            with safe_globals():
                torch.load(path / "rng_state.pth", weights_only=True)
            schedule = torch.load(path / "scheduler.pt", weights_only=True)
            optimizer = torch.load(path / "optimizer.pt", weights_only=True)
            state = digest(load_file(path / "model.safetensors"), optimizer, schedule)
        except Exception:  # whatever is wrong with it, it is not whole
            continue
        if path.name == f"checkpoint-{step}" and truth.get(step) == state:
            found[step] = '"saving"' not in _text(path / "nanproof.json")
    return found


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def finished(whole: dict[int, bool]) -> int:
    return max((step for step, done in whole.items() if done), default=0)


def truth_of(spec: TrainerSpec, folder: Path) -> dict[int, int]:
    said = Child(reference, spec, folder / "reference").end(120)
    shutil.rmtree(folder / "reference", ignore_errors=True)
    if "reference" not in said:
        raise RuntimeError(f"the undisturbed run failed: {said}")
    return {int(step): number for step, number in said["reference"]["table"].items()}


def measure(spec: TrainerSpec, folder: Path) -> tuple[int, float]:
    """How many calls to the disk a save makes, and how many seconds a whole life takes on this machine today."""
    board, start = Board(), time.perf_counter()
    Child(life, spec, folder / "measured", board, None).end(120)
    shutil.rmtree(folder / "measured", ignore_errors=True)
    return board.read(Board.CALLS + PHASES.index("saving")), time.perf_counter() - start


def kill_runs(count: int, seed: int, every: int, steps: int, term: bool, progress: bool) -> Resumes:
    """Runs that are ended and started again until they are through, until there were enough of them."""
    tally, order = Resumes(), random.Random(seed)
    number = 0
    with tempfile.TemporaryDirectory() as home:
        calls, longest = measure(TrainerSpec(every, seed, steps), Path(home))
        while tally.trials < count:
            limit = (3, 1, None)[number % 3]
            spec = TrainerSpec(every, seed + number, steps, limit, on_signal=term)
            run = Path(home, str(number))
            run.mkdir()
            _run(spec, run, tally, order, count, calls, longest, term)
            shutil.rmtree(run)
            number += 1
            if progress:
                print(f"every {every}: {tally.trials} of {count}", file=sys.stderr)
    return tally


def _run(
    spec: TrainerSpec, run: Path, tally: Resumes, order: random.Random, most: int, calls: int, longest: float, term: bool
) -> None:
    truth, folder, first = truth_of(spec, run), run / "out", tally.trials
    board, promised = Board(), 0
    for number in range(20 * KILLS_A_RUN):
        where = f"every {spec.every}, seed {spec.seed}, life {number}"
        before = whole_on_disk(folder, truth)
        in_peace = tally.trials - first >= KILLS_A_RUN or tally.trials >= most
        inside = not in_peace and not term and order.random() < 0.6
        plan = Plan("saving", order.randint(1, 3), order.randint(0, calls + 1)) if inside else None
        board.wipe()
        child = Child(life, spec, folder, board, plan)
        if term and not in_peace:
            _wait(board)
            time.sleep(order.uniform(0, longest / 6))
            os.kill(child.pid, signal.SIGTERM)
            said = child.end(GRACE)
        else:
            said = child.end(60 if in_peace or inside else order.uniform(0, longest))
        after, reached = whole_on_disk(folder, truth), board.read(STEP) - 1
        _judge(tally, said, before, truth, where)
        if finished(after) < finished(before):
            tally.gone(f"{where}: whole before {sorted(before)}, after {sorted(after)}")
        if "finished" in said:
            tally.ended(said["finished"], truth[spec.steps], where)
            return
        ended = said.get("left") or child.killed or (term and not in_peace)
        if "died" in said or not ended:
            tally.failed += 1
            tally.problems.append(f"{where}: {said.get('died', 'it ended without a word')}")
            return
        if in_peace:
            tally.problems.append(f"{where}: it hung")
            return
        tally.trials += 1
        tally.details["inside a save" if inside else "at any time"] += 1
        newest = max((int(path.name.partition("-")[2]) for path in folder.glob("checkpoint-*")), default=0)
        tally.partial += newest > 0 and newest not in after
        lost = max(0, reached - finished(after))
        tally.steps_lost += lost
        if term and "left" in said:
            tally.left += said["left"]["status"] == 0
            if child.killed or lost or said["left"]["status"] != 0:
                tally.problems.append(f"{where}: SIGTERM at step {reached} left {sorted(after)}: {said['left']}")
        elif term and (lost or child.killed):
            tally.problems.append(f"{where}: SIGTERM at step {reached} was not heard: {sorted(after)}")
        promised = finished(after)
    tally.problems.append(f"every {spec.every}, seed {spec.seed}: never came to its end (last whole: {promised})")


def _wait(board: Board) -> None:
    """Until the life trains: a signal that comes earlier ends it, and nothing is lost."""
    deadline = time.monotonic() + 20
    while not board.read(STEP) and time.monotonic() < deadline:
        time.sleep(0.002)


def _judge(tally: Resumes, said: dict[str, Any], before: dict[int, bool], truth: dict[int, int], where: str) -> None:
    """From where a life went on: from the newest finished checkpoint, or from a whole one behind it."""
    if "resumed" not in said:
        return
    step = said["resumed"]["step"]
    tally.resumed(said["resumed"], step if step in before and step >= finished(before) else finished(before), truth, where)


def campaign(kills: int, terms: int, seed: int, steps: int, progress: bool) -> dict[str, Resumes]:
    torch.set_num_threads(1)
    for name in ("nanproof.integrations.huggingface._trainer", "deepspeed", "torchdata.stateful_dataloader"):
        with suppress(ImportError):  # what every life would import by itself otherwise
            import_module(name)
    gc.freeze()
    parts = {}
    for every in (1, 10):
        if kills:
            parts[f"SIGKILL, saving every {every}"] = kill_runs(kills // 2, seed, every, steps, False, progress)
    for every in (1, 10):
        if terms:
            parts[f"SIGTERM, saving every {every}"] = kill_runs(terms // 2, seed + 1000, every, steps, True, progress)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--terms", type=int, default=100)
    parser.add_argument("--steps", type=int, default=40, help="of one run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the tallies there")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/trainer_kills.json")
    args = parser.parse_args()
    start = time.perf_counter()
    parts = campaign(args.kills, args.terms, args.seed, args.steps, progress=not args.json)
    for name, tally in parts.items():
        for problem in tally.problems:
            print(f"{name}: {problem}", file=sys.stderr)
        counts = ", ".join(f"{what} {count}" for what, count in sorted(tally.details.items()))
        print(f"  {name}: {counts}; {tally.partial} left a partial newest folder, {tally.failed} starts failed, "
              f"{tally.steps_lost} steps taken again, {tally.left} ended by themselves")  # fmt: skip
    print(table(parts))  # type: ignore[arg-type]
    seconds = time.perf_counter() - start
    print(f"({seconds:.0f} s)")
    facts = {name: {**vars(tally), "details": dict(tally.details)} for name, tally in parts.items()}
    if args.json:
        Path(args.json).write_text(json.dumps(facts, indent=1))
    if args.save:
        from tools.results import cpu_name, save

        save("trainer_kills", cpu_name(), {"seconds": round(seconds), "parts": facts})
    raise SystemExit(0 if all(tally.fine for tally in parts.values()) else 1)


if __name__ == "__main__":
    main()
