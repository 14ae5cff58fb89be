"""How good forecasts are: on runs that fail gradually, on healthy ones that look as if they would, on the zoo, and on
`zoo.healthy`'s. All under `observe=True`, as a user has it.

OMP_NUM_THREADS=1 python -m benchmarks.forecast [--only design holdout zoo healthy]     # six minutes on one core

A forecast is true if the run then fails: a step is refused for non-finite values, or divergence begins. Lead is the steps from
the first forecast to that. On a healthy run every forecast is false.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import nanproof
from tools.results import RESULTS, cpu_name, save
from zoo.forecast.runs import RUNS, Run, failure_step, guarded


@dataclass
class Told:
    """What was said of one run."""

    name: str
    family: str
    fails: bool
    failed: int | None
    said: list[tuple[int, str, float | None, float | None]] = field(default_factory=list)
    """(step, kind, in how many steps, more or less) of forecasts before the failure."""

    @property
    def lead(self) -> int | None:
        return self.failed - self.said[0][0] if self.failed is not None and self.said else None

    @property
    def off(self) -> list[float]:
        """Of each forecast that says when: by how many margins the run failed later, or earlier."""
        dated = [(step, steps, margin) for step, _, steps, margin in self.said if steps is not None and margin is not None]
        return [(self.failed - step - steps) / margin for step, steps, margin in dated if self.failed is not None]


def before(guard: nanproof.Guard, failed: int | None) -> list[tuple[int, str, float | None, float | None]]:
    return [(f.step, f.kind, f.steps, f.margin) for f in guard.forecasts if failed is None or f.step < failed]


def corpus(split: str) -> Iterator[Told]:
    for run in RUNS:
        if run.split == split:
            yield one(run)


def one(run: Run) -> Told:
    guard = guarded(run, observe=True)
    failed = failure_step(guard)
    return Told(run.name, run.family, run.fails, failed, before(guard, failed))


def zoo() -> Iterator[Told]:
    """Cases that fail at once cannot be foreseen: the question here is mostly what is said of their healthy twins."""
    from zoo.guarded import run
    from zoo.plain import load
    from zoo.registry import CASES

    load()
    for case in CASES.values():
        for fixed in (False, True):
            torch.manual_seed(0)
            told = run(case.build(fixed), observe=True, policy=nanproof.Policy(diagnose="never"))
            failed = min((i.step for i in told.incidents), default=None)
            fails = not fixed and case.cause != "benign" and failed is not None
            name = f"{case.name}{' (twin)' if fixed else ''}"
            yield Told(name, "zoo" if not fixed else "twins", fails, failed if fails else None, before(told.guard, failed))


def healthy() -> Iterator[Told]:
    import healthy as runs

    original: Any = nanproof.Guard
    nanproof.Guard = lambda *args, **kwargs: original(*args, **{**kwargs, "observe": True})  # type: ignore
    try:
        for seed in range(3):
            for kind in runs.KINDS:
                torch.manual_seed(seed)
                for guard in kind():
                    guard.close()
                    yield Told(f"{kind.__name__}/{seed}", kind.__name__, False, None, before(guard, None))
    finally:
        nanproof.Guard = original  # type: ignore


PARTS: dict[str, Callable[[], Iterable[Told]]] = {
    "design": lambda: corpus("design"),
    "holdout": lambda: corpus("holdout"),
    "zoo": zoo,
    "healthy": healthy,
}


def summary(told: list[Told]) -> dict[str, Any]:
    fails, fine = [t for t in told if t.fails], [t for t in told if not t.fails]
    leads = sorted(t.lead for t in fails if t.lead is not None)
    false = [t for t in fine if t.said]
    return {
        "fails": len(fails),
        "foreseen": len(leads),
        "median_lead": statistics.median(leads) if leads else None,
        "shortest_lead": leads[0] if leads else None,
        "longest_lead": leads[-1] if leads else None,
        "healthy": len(fine),
        "false": len(false),
        "precision": len(leads) / (len(leads) + len(false)) if leads or false else None,
        "recall": len(leads) / len(fails) if fails else None,
        "dated": sum(len(t.off) for t in fails),
        "in_time": sum(abs(x) <= 1 for t in fails for x in t.off),
        "too_early": sum(x > 1 for t in fails for x in t.off),
        "by_family": {
            family: {
                "fails": of_it[0].fails,
                "runs": len(of_it),
                "warned": sum(bool(t.said) for t in of_it),
                "leads": [t.lead for t in of_it if t.lead is not None],
                "kinds": sorted({kind for t in of_it for _, kind, _, _ in t.said}),
            }
            for family in dict.fromkeys(t.family for t in told)
            if (of_it := [t for t in told if t.family == family])
        },
        "false_ones": [{"name": t.name, "said": t.said} for t in false],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    logging.disable()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for part in args.only:
        start = time.perf_counter()
        results[part] = summary(list(PARTS[part]()))
        results[part]["seconds"] = time.perf_counter() - start
        for family, row in results[part]["by_family"].items():
            print(
                f"  {family:28s} {'fails ' if row['fails'] else 'fine  '} warned {row['warned']} of {row['runs']}",
                row["leads"],
                *row["kinds"],
            )
        for false in results[part]["false_ones"]:
            print("  FALSE", false["name"], false["said"][:3])
        shown = {key: value for key, value in results[part].items() if key not in ("by_family", "false_ones")}
        print(part, shown, flush=True)
    if args.save:
        print(f"written to {save('forecast', cpu_name(), results, args.out)}")


if __name__ == "__main__":
    main()
