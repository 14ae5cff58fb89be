"""What the guard does with the optimizers people use: writes docs/optimizers.md.

python -m tools.optimizers [--only NAME ...] [--json]     # or make optimizers; under ten minutes on two cores

Each optimizer has a process of its own with a time limit, so a crash costs one row. The expectation
is fixed before any run: `ABSENT` names what cannot be built on a CPU, and every other cell is a yes.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from datetime import date
from importlib.metadata import packages_distributions, version
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from tools import optimizer_checks as checks
from tools.optimizer_list import ABSENT, ENTRIES, TRANSFORMERS, Entry
from tools.results import cpu_name

PAGE = Path(__file__).parents[1] / "docs" / "optimizers.md"
LIMIT = 240.0
"""Seconds for one optimizer."""

CHECKS: dict[str, Callable[[Entry, checks.Numbers], str]] = {
    "unchanged": checks.unchanged,
    "refused": checks.refused,
    "rolled back, weight": checks.rolled_back_weight,
    "rolled back, moment": checks.rolled_back_moment,
    "resumed": checks.resumed,
    "Trainer": checks.protected,
}
DISTRIBUTIONS = packages_distributions()
Row = dict[str, Any]


def survey(entry: Entry, results: Connection) -> None:
    """Run every check of one optimizer, and send each result as soon as it is known."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.setpgrp()  # what it starts ends with it
    torch.compiler.set_stance("default" if entry.compiled else "force_eager")
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)

    def check(name: str, judge: Callable[[], Any]) -> str:
        try:
            verdict = judge()
        except BaseException as error:
            verdict = checks.line_of(error)
        results.send((name, verdict))
        return str(verdict)

    try:
        training = checks.Training(entry)
        training.step(checks.batches()[0])
    except BaseException as error:
        results.send(("absent", checks.line_of(error).removeprefix("crash: ")))
        return
    modules = {type(member).__module__.split(".")[0] for member in training.members}
    packages = sorted({DISTRIBUTIONS[module][0] for module in modules if module in DISTRIBUTIONS})
    results.send(("from", ", ".join(f"{p} {version(p).split('+')[0]}" for p in packages) or "written here"))
    check("path", lambda: training.guard().path)
    oracle: checks.Numbers = {}
    healthy = check("healthy", lambda: oracle.update(checks.healthy(entry)))
    for name, judge in CHECKS.items():
        if name == "Trainer" and entry.section != TRANSFORMERS:
            continue
        if name in ("unchanged", "Trainer") or oracle:
            check(name, lambda judge=judge: judge(entry, oracle))
        else:
            results.send((name, healthy))
    check("cost", lambda: checks.cost(entry))


def survey_all(entries: list[Entry], processes: int) -> dict[str, Row]:
    """Survey every entry, `processes` at a time."""
    fork, waiting, rows = multiprocessing.get_context("fork"), list(entries), {}
    running: dict[Any, tuple[Entry, Any, Connection, float]] = {}
    while waiting or running:
        while waiting and len(running) < processes:
            entry = waiting.pop(0)
            reader, writer = fork.Pipe(duplex=False)
            process = fork.Process(target=survey, args=(entry, writer))
            process.start()
            writer.close()
            running[process.sentinel] = (entry, process, reader, time.monotonic())
            rows[entry.name] = {"section": entry.section}
        done = wait(list(running), timeout=1.0)
        for sentinel, (entry, process, reader, start) in list(running.items()):
            row, seconds = rows[entry.name], time.monotonic() - start
            if sentinel not in done and seconds > LIMIT:
                os.killpg(process.pid, signal.SIGKILL)
            elif sentinel not in done:
                continue
            process.join()
            receive(reader, row)
            if process.exitcode:
                row["died"] = f"killed after {LIMIT:.0f} s" if seconds > LIMIT else f"exit status {process.exitcode}"
            row["seconds"] = round(seconds, 1)
            del running[sentinel]
            print(f"{len(rows) - len(running):3} of {len(entries)} {entry.name}: {summary(row)}", file=sys.stderr)
    return {entry.name: rows[entry.name] for entry in entries}


def receive(reader: Connection, row: Row) -> None:
    """Take what a process sent until it ended."""
    try:
        while reader.poll():
            name, verdict = reader.recv()
            row[name] = verdict
    except EOFError:
        pass


def verdicts(row: Row) -> dict[str, str]:
    """Return what each check of a built optimizer found; a missing result is the process's death."""
    names = [name for name in CHECKS if name != "Trainer" or row["section"] == TRANSFORMERS]
    return {name: str(row.get(name, f"crash: {row.get('died', 'no result')}")) for name in names}


def passed(verdict: str) -> bool:
    return verdict in ("yes", "no state")


def summary(row: Row) -> str:
    if "absent" in row:
        return f"not built: {row['absent']}"
    bad = [name for name, verdict in verdicts(row).items() if not passed(verdict)]
    return f"{row['seconds']} s, {'fails: ' + ', '.join(bad) if bad else 'exact'}"


def totals(rows: dict[str, Row]) -> dict[str, int]:
    built = [verdicts(row) for row in rows.values() if "absent" not in row]
    back = ("rolled back, weight", "rolled back, moment")
    return {
        "names": len(rows),
        "built": len(built),
        **{name: sum(passed(row[name]) for row in built) for name in ("unchanged", "refused")},
        "rolled back": sum(all(passed(row[name]) for name in back) for row in built),
        "resumed": sum(passed(row["resumed"]) for row in built),
        "Trainer": sum(passed(row["Trainer"]) for row in built if "Trainer" in row),
        "of Trainer": sum("Trainer" in row for row in built),
        "exact in everything": sum(all(map(passed, row.values())) for row in built),
        "crashed somewhere": sum(any(v.startswith("crash") for v in row.values()) for row in built),
    }


def page(rows: dict[str, Row]) -> str:
    """Return docs/optimizers.md."""
    n = totals(rows)
    built = {name: row for name, row in rows.items() if "absent" not in row}
    lines = [
        "# Optimizers",
        "",
        "<!-- Written by `make optimizers`. -->",
        f"Of {n['names']} optimizers, {n['built']} can be built on a CPU. Of these, nanproof refuses a bad batch exactly with "
        f"{n['refused']}, rolls back exactly with {n['rolled back']} and resumes exactly with {n['resumed']}. "
        "Exact means bit-identical weights and optimizer state, compared with a run that nothing happened to.",
        "",
        "| column | what was done |",
        "|---|---|",
        "| unchanged | a healthy run ends as it does without a guard |",
        "| refused | one batch has a NaN loss and NaN gradients, with `guard.step` and with `guard.train_step` |",
        "| rolled back | a weight, and in a second run the optimizer's state, gets a NaN; `Policy(snapshot_every=3)` |",
        "| resumed | the process is killed, and a new one with other initial weights calls `guard.resume()` |",
        "| Trainer | a real `Trainer` under `nanproof.protect(trainer)` gets the bad batch while the learning rate warms up |",
        "| cost | `guard.step` relative to `clip_grad_norm_` and `optimizer.step`, 4 M parameters, median of 9 pairs |",
        "",
        f"{cpu_name()}, one thread, torch {torch.__version__}, {date.today().isoformat()}. Costs are single measurements on a "
        "shared machine: differences below 0.1 mean nothing. torch.compile is off except where the name says so.",
    ]
    for section in dict.fromkeys(row["section"] for row in built.values()):
        lines += ["", f"## {section}", ""]
        lines += [
            "| name | from | path | unchanged | refused | rolled back | resumed | Trainer | cost |",
            "|" + "---|" * 8 + "---:|",
        ]
        lines += [table_row(name, row) for name, row in built.items() if row["section"] == section]
    failures: dict[tuple[str, str], list[str]] = {}
    for name, row in built.items():
        for check, verdict in verdicts(row).items():
            if not passed(verdict):
                failures.setdefault((name, verdict), []).append(check)
    lines += ["", "## What fails, and how", ""]
    lines += ["| name | checks | what happens |", "|---|---|---|"] if failures else ["Nothing."]
    lines += [f"| {name} | {'; '.join(of)} | {escaped(verdict)} |" for (name, verdict), of in failures.items()]
    lines += ["", "## Not available on a CPU", "", "| name | why | what building it raises |", "|---|---|---|"]
    for name, row in rows.items():
        if "absent" in row:
            lines.append(f"| {name} | {ABSENT.get(name, 'not expected')} | {escaped(row['absent'])} |")
    return "\n".join(lines) + "\n"


def table_row(name: str, row: Row) -> str:
    found = {check: verdict.split(":")[0] for check, verdict in verdicts(row).items()}
    weight, moment = found.pop("rolled back, weight"), found.pop("rolled back, moment")
    back = weight if moment in (weight, "no state") else f"weight {weight}, state {moment}"
    path = escaped(str(row.get("path", ""))).replace("crash: ", "")
    cost = row.get("cost", "")
    cells = [name, row["from"], path if len(path) <= 60 else path[:59] + "…", found["unchanged"], found["refused"], back]
    cells += [found["resumed"], found.get("Trainer", ""), f"{cost:.2f}" if isinstance(cost, float) else "crash"]
    return f"| {' | '.join(cells)} |"


def escaped(text: str) -> str:
    """Return the first line of a text, short, as a cell of a table."""
    line = text.partition("\n")[0]
    return (line if len(line) <= 200 else line[:199] + "…").replace("|", "\\|").replace("<", "&lt;")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="survey these names, and print their page")
    parser.add_argument("--json", action="store_true", help="print every result as JSON too")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    unknown = set(options.only or ()) - {entry.name for entry in ENTRIES}
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}\nhint: the names are {', '.join(e.name for e in ENTRIES)}")
    rows = survey_all([e for e in ENTRIES if not options.only or e.name in options.only], options.processes)
    unexpected = [name for name, row in rows.items() if ("absent" in row) != (name in ABSENT)]
    if options.json:
        print(json.dumps({"totals": totals(rows), "unexpected": unexpected, "rows": rows}, indent=1))
    if not options.only:
        PAGE.write_text(page(rows))
    elif not options.json:
        print(page(rows))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{totals(rows)}\nabsence not as expected: {', '.join(unexpected) or 'none'}", file=sys.stderr)
    print(f"{used.ru_utime + used.ru_stime:.0f} s of CPU time, {options.processes} processes", file=sys.stderr)


if __name__ == "__main__":
    main()
