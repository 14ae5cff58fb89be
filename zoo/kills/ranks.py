"""One rank of two is killed. The other hangs in a collective and is killed too, as torchrun would; both are started again."""

from __future__ import annotations

import os
import random
import tempfile
import time
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from zoo.kills.campaign import Child, Tally, good_on_disk, newest, remains
from zoo.kills.worker import Board, Killer, Plan, Run, Spec, quiet, tell

LONGEST = 2.5
"""Seconds of a life, at the most."""
PATIENCE = 0.4
"""Seconds for the other rank to get on alone, before it is killed."""


def rank_life(
    pipe: int, rank: int, spec: Spec, meeting: Path, folder: Path | None, board: Board, plan: Plan | None, poison_after: int
) -> None:
    """One rank of a run: resume if there is a folder, report, train to the end, report the checksums of all steps."""
    told = quiet()
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    if folder is not None:
        Killer(board, plan).install()
    run, start = Run(spec, folder, rank), 0
    if folder is not None:
        start = run.guard.resume()
        run.data = run.guard.wrap(run.data)
        tell(pipe, "resumed", step=start, digest=run.digest(), said=told.lines)
    table, taken = {0: run.digest()}, 0

    def stepped(step: int) -> None:
        nonlocal taken
        taken += 1
        table[step] = run.digest()
        if (
            taken >= poison_after > 0 and step < spec.steps and (start or run.guard.parts.recovery.has_good)
        ):  # the same on both ranks
            taken = -(10**9)
            run.poison()

    run.train(spec.steps, stepped)
    run.guard.close()
    tell(pipe, "finished", digest=run.digest(), table=table, said=told.lines)
    dist.barrier()
    os._exit(0)  # taking gloo down after DDP aborts now and then


def both(spec: Spec, home: Path, folder: Path | None, boards: list[Board], plans: list[Plan | None], poison: int) -> list[Child]:
    meeting = Path(tempfile.mkdtemp(dir=home)) / "meeting"
    return [Child(rank_life, rank, spec, meeting, folder, boards[rank], plans[rank], poison) for rank in (0, 1)]


def one_of_two(kills: int, seed: int, steps: int = 60) -> Tally:
    """Runs of two ranks whose one or other rank is killed, at a random moment or in the middle of saving."""
    tally, chance, boards = Tally(), random.Random(seed), [Board(), Board()]
    for number in count():
        if tally.trials >= kills:
            break
        spec = Spec("own loop" if number % 2 else "poisoned", seed + number, steps)
        with tempfile.TemporaryDirectory() as home:
            said = [child.end(120) for child in both(spec, Path(home), None, boards, [None, None], 0)]
            tables = [{int(k): v for k, v in rank["finished"]["table"].items()} for rank in said]
            if not _run(spec, Path(home), tables, tally, chance, boards, kills):
                break
    return tally


def _run(
    spec: Spec, home: Path, tables: list[dict[int, int]], tally: Tally, chance: random.Random, boards: list[Board], kills: int
) -> bool:
    folder = home / "checkpoints"
    for number in range(60):
        before = good_on_disk(folder)
        victim, in_peace = chance.randrange(2), tally.trials >= kills or number >= 20
        plans: list[Plan | None] = [None, None]
        if not in_peace and chance.random() < 0.5:
            phase = chance.choice(["saving", "saving", "resuming", "going back", *(["promoting", "deleting"] * (victim == 0))])
            plans[victim] = Plan(phase, 1 if phase in ("resuming", "going back") else chance.randint(1, 3), chance.randint(0, 30))
        for board in boards:
            board.wipe()
        ranks = both(spec, home, folder, boards, plans, chance.choice([0, 12]))
        said: list[dict[str, Any]] = [{}, {}]
        timed = plans[victim] is None and not in_peace
        said[victim] = ranks[victim].end(chance.uniform(0.1, LONGEST) if timed else 120)
        said[1 - victim] = ranks[1 - victim].end(PATIENCE if ranks[victim].killed else 120)
        where = f"two ranks, seed {spec.seed}, life {number}, rank {victim} ({boards[victim].phase}, {plans[victim]})"
        for rank in (0, 1):
            if "resumed" in said[rank]:
                tally.resumed(said[rank]["resumed"], newest(before), tables[rank], f"{where}: rank {rank}")
        good = good_on_disk(folder)
        if len(good) < min(1, len(before)) or newest(good) < boards[0].read(Board.PROMOTED):
            tally.gone(f"{where}: good before {sorted(before)}, after {sorted(good)}")
        if ranks[victim].killed and not in_peace:
            tally.trials += 1
            tally.details[f"rank {victim}, {boards[victim].phase}"] += 1
        elif all("finished" in rank for rank in said):
            for rank in (0, 1):
                tally.ended(said[rank]["finished"], tables[rank][spec.steps], f"{where}: rank {rank}")
            if remains(folder):
                tally.problems.append(f"{where}: {remains(folder)} stayed")
            return True
        else:
            tally.problems.append(f"{where}: {[{k: str(v)[:300] for k, v in rank.items()} for rank in said]}")
            return False
        time.sleep(0.01)
    tally.problems.append("two ranks: never came to the end")
    return False
