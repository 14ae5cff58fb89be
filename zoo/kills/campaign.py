"""Kill a training hundreds of times, damage its checkpoints, fill its disk: is a good checkpoint ever lost, or a bad one loaded?

python -m zoo.kills --kills 300 --damaged 100 --ranks 10

A small run (dropout, BatchNorm, AdamW, a schedule, shuffled data, bad batches that are skipped, trouble that sends it back) is
killed with SIGKILL again and again and started anew each time, until it is through. Some kills come at random moments, the
others inside of operations that are too short to be hit by chance: see `worker.py`. The truth comes from elsewhere: a few
lines here read the marks and checksums on the disk, and a run that nothing happens to says what weights, buffers, optimizer
state, schedule and random numbers must be at every step, bit for bit.

Lives are forked from this process, which never computes anything itself: a start costs milliseconds instead of seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import select
import signal
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported by the first optimizer otherwise, in every life
import torch.distributed.checkpoint.filesystem
import torch.distributed.checkpoint.state_dict_loader
import torch.distributed.checkpoint.state_dict_saver

from zoo.kills.worker import PHASES, STRUCK, Board, Plan, Spec, life, reference

KINDS = ("poisoned", "capped", "own loop")
KILLS_A_RUN = 40
"""After so many the run is left in peace."""


@dataclass
class Tally:
    """What one part of the campaign came to."""

    trials: int = 0
    resumes: int = 0
    """Starts that came as far as saying what they resumed from."""
    resumed_good: int = 0
    """Of these: from the newest good checkpoint there was (or from 0 where there was none), bit for bit."""
    ends: int = 0
    identical: int = 0
    lost: int = 0
    """Good checkpoints that were gone, and not through rotation."""
    bad_loads: int = 0
    problems: list[str] = field(default_factory=list)
    details: Counter[str] = field(default_factory=Counter)

    @property
    def fine(self) -> bool:
        return (
            not (self.lost or self.bad_loads or self.problems)
            and self.resumed_good == self.resumes
            and self.identical == self.ends
        )

    def resumed(self, report: dict[str, Any], newest: int, table: dict[int, int], where: str) -> None:
        """Judge what a life said it resumed from."""
        self.resumes += 1
        right = table.get(report["step"]) == report["digest"]
        self.resumed_good += right and report["step"] == newest
        self.bad_loads += not right
        if not right:
            self.problems.append(f"{where}: what was loaded as step {report['step']} is not the state of that step")
        elif report["step"] != newest:
            self.problems.append(
                f"{where}: resumed from step {report['step']}, the newest good one is {newest}. {report['said']}"
            )

    def ended(self, report: dict[str, Any], digest: int, where: str) -> None:
        self.ends += 1
        self.identical += report["digest"] == digest
        if report["digest"] != digest:
            self.problems.append(f"{where}: the end differs from the undisturbed run's")

    def gone(self, why: str) -> None:
        self.lost += 1
        self.problems.append(why)


# -- processes -----------------------------------------------------------------------------------------------------------------


class Child:
    """A forked life, and what it says through a pipe."""

    def __init__(self, function: Callable[..., None], *args: Any) -> None:
        self._read, write = os.pipe()
        self._said = b""
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                os.close(self._read)
                function(write, *args)
                status = 0
            except BaseException as error:
                with os.fdopen(write, "w", closefd=False) as pipe:
                    pipe.write(json.dumps({"what": "died", "why": f"{type(error).__name__}: {error}"}) + "\n")
            finally:
                os._exit(status)
        os.close(write)
        self.killed = False

    def end(self, timeout: float) -> dict[str, dict[str, Any]]:
        """Everything it said, once it has died by itself, or after so many seconds was killed."""
        deadline = time.monotonic() + timeout
        while True:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.kill()
            chunk = os.read(self._read, 1 << 16)
            if not chunk:
                break
            self._said += chunk
        os.close(self._read)
        _, status = os.waitpid(self.pid, 0)
        self.killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        said = [json.loads(line) for line in self._said.decode().splitlines()]
        return {report["what"]: report for report in said}

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def table_of(spec: Spec) -> dict[int, int]:
    """The checksums of the undisturbed run."""
    said = Child(reference, spec).end(120)
    if "reference" not in said:
        raise RuntimeError(f"the undisturbed run failed: {said}")
    return {int(step): digest for step, digest in said["reference"]["table"].items()}


# -- the disk, read without the library ----------------------------------------------------------------------------------------


def good_on_disk(folder: Path) -> dict[str, int]:
    """Name and step of every checkpoint whose mark, manifest and files agree, newest last."""
    found = {}
    for path in folder.glob("step-*"):
        match = re.fullmatch(r"step-(\d+)(?:-(\d+))?", path.name)
        if match and _holds(path, int(match[1])):
            found[path.name] = int(match[1]), int(match[2] or 1)
    return {name: found[name][0] for name in sorted(found, key=lambda name: found[name])}


def _holds(path: Path, step: int) -> bool:
    try:
        manifest = (path / "manifest.json").read_bytes()
        said = json.loads(manifest)
        return (
            json.loads((path / "good.json").read_bytes())["manifest"] == f"{zlib.crc32(manifest):08x}"
            and said["step"] == step
            and all(_matches((path / name).read_bytes(), facts) for name, facts in said["files"].items())
        )
    except (OSError, ValueError, LookupError):
        return False


def _matches(data: bytes, facts: dict[str, Any]) -> bool:
    return len(data) == facts["bytes"] and f"{zlib.crc32(data):08x}" == facts["crc32"]


def newest(good: dict[str, int]) -> int:
    return max(good.values(), default=0)


def remains(folder: Path) -> list[str]:
    """What is half written or half deleted."""
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.name.endswith((".partial", ".old", ".tmp"))]


# -- killing -------------------------------------------------------------------------------------------------------------------


def points(calls: dict[str, int], order: random.Random) -> Iterator[Plan]:
    """The operations in turn; of each, every call in random order, again and again."""
    left: dict[str, list[int]] = {phase: [] for phase in calls}
    while True:
        for phase in order.sample(sorted(calls), len(calls)):
            left[phase] = left[phase] or order.sample(range(calls[phase] + 1), calls[phase] + 1)
            once = phase in ("building", "resuming", "going back")
            victim = order.choice(("run", "writer", "both"))
            yield Plan(phase, 1 if once else order.randint(1, 3), left[phase].pop(), victim)


def calls_of(spec: Spec) -> tuple[dict[str, int], float]:
    """How many calls to the disk each operation makes, at the most, in a life that is not killed; and how many seconds a life of
    thirty steps takes on this machine today."""
    board, seconds = Board(), 0.0
    with tempfile.TemporaryDirectory() as folder:
        for steps in (40, 70):
            start = time.perf_counter()
            Child(life, Spec(spec.kind, spec.seed, steps), Path(folder), board, None, 15).end(120)
            seconds = time.perf_counter() - start
    return {phase: board.read(Board.CALLS + PHASES.index(phase)) for phase in STRUCK}, seconds


def kill_runs(kills: int, seed: int, steps: int, progress: bool = False, kinds: tuple[str, ...] = KINDS) -> Tally:
    """Runs that are killed and started again until they are through, until there were enough kills."""
    tally, order, board = Tally(), random.Random(seed), Board()
    plans: dict[str, Iterator[Plan]] = {}
    for kind in kinds:
        calls, longest = calls_of(Spec(kind, seed, steps))
        plans[kind] = points(calls, order)
    number = 0
    while tally.trials < kills:
        spec = Spec(kinds[number % len(kinds)], seed + number, steps)
        with tempfile.TemporaryDirectory() as folder:
            _kill_run(spec, Path(folder), tally, order, board, plans[spec.kind], kills, longest)
        number += 1
        if progress:
            print(f"{tally.trials} of {kills} kills", file=sys.stderr)
    return tally


def _kill_run(
    spec: Spec, folder: Path, tally: Tally, order: random.Random, board: Board, plans: Iterator[Plan], most: int, longest: float
) -> None:
    table, first = table_of(spec), tally.trials
    for number in range(10 * KILLS_A_RUN):
        where = f"{spec.kind}, seed {spec.seed}, life {number}"
        before = good_on_disk(folder)
        in_peace = tally.trials - first >= KILLS_A_RUN or tally.trials >= most
        plan = next(plans) if not in_peace and order.random() < 0.6 else None
        timed = plan is None and not in_peace
        board.wipe()
        child = Child(life, spec, folder, board, plan, order.randint(8, 30))
        said = child.end(order.uniform(0, longest) if timed else 60)
        if "resumed" in said:
            tally.resumed(said["resumed"], newest(before), table, where)
        good = good_on_disk(folder)
        where += f" ({board.phase}, {plan})"
        _compare(before, good, spec, board, tally, where)
        if child.killed and (plan is not None or timed):
            tally.trials += 1
            tally.details[("inside: " if plan else "any time: ") + board.phase] += 1
        elif child.killed:
            tally.problems.append(f"{where}: it hung")
        elif plan is not None and plan.victim == "writer" and board.read(Board.STRUCK):
            tally.trials += 1
            tally.details[f"only the writer: {board.phase}"] += 1
            if not any("process that writes checkpoints was killed" in line for line in said.get("finished", said)["said"]):
                tally.problems.append(f"{where}: nobody noticed: {said}")
        if child.killed:
            continue
        if "finished" in said:
            tally.ended(said["finished"], table[spec.steps], where)
            if len(good) < spec.keep or remains(folder):
                tally.gone(f"{where}: at the end there are {sorted(good)}, and {remains(folder)}")
            return
        tally.problems.append(f"{where}: {said.get('died')}")
        return
    tally.problems.append(f"{spec.kind}, seed {spec.seed}: never came to its end")


def _compare(before: dict[str, int], after: dict[str, int], spec: Spec, board: Board, tally: Tally, where: str) -> None:
    """Good checkpoints may only go by rotation; going back may give up later ones, but not the last one."""
    went_back = board.read(Board.WENT_BACK) > 0
    least = min(1 if went_back else spec.keep, len(before))
    if len(after) < least:
        tally.gone(f"{where}: good before {sorted(before)}, after {sorted(after)}")
    elif not went_back and newest(after) < newest(before):
        tally.gone(f"{where}: the newest went: good before {sorted(before)}, after {sorted(after)}")
    elif newest(after) < board.read(Board.PROMOTED):
        tally.gone(f"{where}: step {board.read(Board.PROMOTED)} had been promoted, good are {sorted(after)}")


# -- everything ----------------------------------------------------------------------------------------------------------------


def table(parts: dict[str, Tally]) -> str:
    lines = [f"{'':34s} {'trials':>6s} {'resumed good':>13s} {'identical ends':>15s} {'lost good':>10s} {'bad loads':>10s}"]
    for name, t in parts.items():
        resumed, ends = f"{t.resumed_good} of {t.resumes}", f"{t.identical} of {t.ends}"
        lines.append(f"{name:34s} {t.trials:6d} {resumed:>13s} {ends:>15s} {t.lost:10d} {t.bad_loads:10d}")
    return "\n".join(lines)


def campaign(kills: int, damaged: int, ranks: int, disks: bool, steps: int, seed: int, progress: bool) -> dict[str, Tally]:
    from zoo.kills import damage as kill_damage  # both need what stands above
    from zoo.kills import ranks as kill_ranks

    torch.set_num_threads(1)
    work: dict[str, Callable[[], Tally]] = {}
    if kills:
        work["killed"] = lambda: kill_runs(kills, seed, steps, progress)
    if damaged:
        work["damaged checkpoint"] = lambda: kill_damage.damaged(damaged, seed)
    if disks:
        work["disk full, read-only or gone"] = lambda: kill_damage.disks(seed)
        work["two processes in one folder"] = lambda: kill_damage.two_at_once(seed)
    if ranks:
        work["one rank of two killed"] = lambda: kill_ranks.one_of_two(ranks, seed)
    parts = {}
    for name, part in work.items():
        start = time.perf_counter()
        parts[name] = part()
        if progress:
            print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return parts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--damaged", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=12, help="kills of one rank of two")
    parser.add_argument("--no-disks", action="store_true", help="leave out full disks and two processes in one folder")
    parser.add_argument("--steps", type=int, default=200, help="of one run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE", help="write the tallies there")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/kills.json")
    args = parser.parse_args()
    start = time.perf_counter()
    parts = campaign(args.kills, args.damaged, args.ranks, not args.no_disks, args.steps, args.seed, progress=not args.json)
    for name, tally in parts.items():
        for problem in tally.problems:
            print(f"{name}: {problem}", file=sys.stderr)
        for what, count in sorted(tally.details.items()):
            print(f"  {name:32s} {what:36s} {count:5d}")
    print(table(parts))
    seconds = time.perf_counter() - start
    print(f"({seconds:.0f} s)")
    facts = {name: {**vars(tally), "details": dict(tally.details)} for name, tally in parts.items()}
    if args.json:
        Path(args.json).write_text(json.dumps(facts, indent=1))
    if args.save:
        from tools.results import cpu_name, save

        save("kills", cpu_name(), {"seconds": round(seconds), "parts": facts})
    raise SystemExit(0 if all(tally.fine for tally in parts.values()) else 1)
