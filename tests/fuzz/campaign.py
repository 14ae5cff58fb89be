"""Runs mutations through the readers, each in a process with limits, and counts what went wrong."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzz.mutate import mutated, sealed
from fuzz.seeds import Seed, made
from limits import Limits, Outcome

SECONDS, MEBIBYTES = 10, 512


@dataclass
class Tally:
    """What became of the cases of one reader."""

    cases: int = 0
    executed: int = 0
    errors: int = 0
    slow: int = 0
    memory: int = 0
    died: int = 0
    longest: float = 0.0
    most: float = 0.0
    kinds: dict[str, int] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        counts = {name: getattr(self, name) for name in ("cases", "executed", "errors", "slow", "memory", "died")}
        return {**counts, "longest_s": round(self.longest, 2), "most_mib": round(self.most)}

    def count(self, outcome: Outcome, executed: bool) -> bool:
        """Add a case. True if it went wrong."""
        self.cases += 1
        self.executed += executed
        self.longest, self.most = max(self.longest, outcome.seconds), max(self.most, outcome.mebibytes)
        if outcome.error.startswith("took"):
            self.slow += "seconds" in outcome.error
            self.memory += "MiB" in outcome.error
        elif outcome.error.startswith("the process ended"):
            self.died += 1
        elif outcome.error:
            self.errors += 1
        return executed or bool(outcome.error)


def campaign(
    folder: Path,
    mutations: int,
    seed: int,
    only: str = "",
    say: Callable[[str], None] = lambda text: None,
    limits: Limits | None = None,
    jobs: int = 1,
) -> dict[str, Tally]:
    """Cases go round over the seeds, so that each gets as many as the next."""
    seeds = [one for one in made(folder / "seeds") if only in ("", one.reader)]
    tallies = {one.reader: Tally() for one in seeds}

    def part(job: int) -> None:
        own = limits or Limits()
        place = folder / f"job-{job}"
        place.mkdir()
        try:
            _cases(seeds, tallies, range(job, mutations, jobs), seed, place, own, say)
        finally:
            if limits is None:
                own.close()

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(part, range(jobs)))
    return tallies


def _cases(
    seeds: list[Seed],
    tallies: dict[str, Tally],
    cases: range,
    seed: int,
    folder: Path,
    limits: Limits,
    say: Callable[[str], None],
) -> None:
    contents = [(one.folder / one.file).read_bytes() for one in seeds]
    keep = os.environ.get("FUZZ_KEEP")
    for case in cases:
        which = case % len(seeds)
        rng = random.Random(f"{seed} {case}")
        outcome, executed = run(seeds[which], contents, rng, folder, limits)
        if tallies[seeds[which].reader].count(outcome, executed):
            said = f"case {case}: {seeds[which].reader} {seeds[which].name}/{seeds[which].file}"
            say(f"{said}: {'EXECUTED ' * executed}{outcome.error[:700]}")
            if keep:
                shutil.copytree(folder / "case", Path(keep) / f"case-{case}", symlinks=True, dirs_exist_ok=True)


def run(seed: Seed, contents: list[bytes], rng: random.Random, folder: Path, limits: Limits) -> tuple[Outcome, bool]:
    """One mutation. Returns what came of it, and whether something in the file was executed."""
    place, canary = folder / "case", folder / "sung"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(seed.folder, place)
    file = place / seed.file
    file.write_bytes(mutated(file.read_bytes(), rng, contents, canary))
    if seed.seal and rng.random() < 0.7:
        sealed(place / seed.seal)
    outcome = limits.call(f"fuzz.readers:{seed.reader}", str(place / seed.what), seconds=SECONDS, mebibytes=MEBIBYTES)
    executed = canary.exists()
    if executed:
        shutil.rmtree(canary, ignore_errors=True)
    return outcome, executed
