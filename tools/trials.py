"""Run the trial of every cause that matches a case of the zoo, not only of the one that is named.

A trial that holds on a case of another cause would have verified a wrong answer. Writes
benchmarks/results/trials.json:

    python -m tools.trials --save        # about four minutes on two cores
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import multiprocessing
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from nanproof import Diagnosis, Policy
from nanproof.explain import _diagnose
from nanproof.explain._case import Case, Trial
from nanproof.explain.causes import Cause
from zoo.guarded import run
from zoo.plain import load
from zoo.registry import CASES

SAVED = Path(__file__).parents[1] / "benchmarks" / "results" / "trials.json"
Trials = dict[str, Trial | None]
"""What became of each trial, by the slug of its cause; None where a match has no trial."""


def trials_of(name: str) -> tuple[Diagnosis | None, Trials]:
    """Return the diagnosis of a zoo case's first incident, and all trials on the same step."""
    seen: list[tuple[Diagnosis, Trials]] = []
    explain = _diagnose.explain

    def explain_and_try(case: Case) -> Diagnosis:
        trials = _diagnose.outcomes(case)
        seen.append((explain(case), trials))
        return seen[-1][0]

    with mock.patch.object(_diagnose, "explain", explain_and_try):
        first = run(CASES[name].build(False), policy=Policy(diagnose_seconds=300)).first
    diagnosis = first.diagnosis if first is not None else None
    # Suspicions that came to nothing are diagnosed as well: take the one that the incident came from.
    return diagnosis, next((trials for made, trials in seen if made is diagnosis), {})


def table_of(cases: dict[str, dict[str, bool]]) -> dict[str, dict[str, Any]]:
    """Return for each cause where its trial held and where it was rejected, from {case: {slug: held}}."""
    table: dict[str, dict[str, Any]] = {}
    for slug in sorted(cause.slug for cause in Cause.catalogue):
        held = [name for name, trials in sorted(cases.items()) if trials.get(slug) is True]
        own = [name for name in held if slug in right_answers(name)]
        table[slug] = {
            "held_on_own": len(own),
            "rejected_on": [name for name, trials in sorted(cases.items()) if trials.get(slug) is False],
            "held_on_others": [name for name in held if name not in own],
        }
    return table


def right_answers(name: str) -> tuple[str, ...]:
    return (CASES[name].cause, *CASES[name].also)


def _one(name: str) -> tuple[str, dict[str, bool], list[str]]:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        diagnosis, trials = trials_of(name)
    named = diagnosis.cause if diagnosis is not None else "nothing"
    tried = {slug: trial for slug, trial in trials.items() if trial is not None}
    lines = [f"{name}: {named}"]
    for slug, trial in tried.items():
        other = "" if slug in right_answers(name) else " (not the cause)"
        lines.append(f"    {slug}{other}: {'held' if trial.held else 'rejected'}: {trial.result}")
    return name, {slug: trial.held for slug, trial in tried.items()}, lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of cases")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/trials.json")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    load()
    names = [n for n, c in CASES.items() if c.cause != "benign" and (not args.only or n in args.only)]
    cases: dict[str, dict[str, bool]] = {}
    with multiprocessing.get_context("fork").Pool(args.processes) as pool:
        for name, held, lines in pool.imap_unordered(_one, names):
            cases[name] = held
            print("\n".join(lines), file=sys.stderr, flush=True)
    table = table_of(cases)
    tried = sum(len(trials) for trials in cases.values())
    own = sum(row["held_on_own"] for row in table.values())
    others = sum(len(row["held_on_others"]) for row in table.values())
    never = [slug for slug, row in table.items() if not row["rejected_on"]]
    print(f"{tried} trials on {len(cases)} cases: {own} held on the cause's own cases, {others} on others")
    print(f"never rejected: {', '.join(never) or 'none'}")
    for slug, row in table.items():
        if row["held_on_others"]:
            print(f"{slug} held on {', '.join(row['held_on_others'])}")
    if args.save and not args.only:
        SAVED.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
