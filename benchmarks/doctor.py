"""How fast logs are read, and in how much memory: beside `grep`, which only looks for three letters.

python -m benchmarks.doctor --save    # logs of 200 MB from a warm page cache; writes benchmarks/results/doctor.json

Three kinds: a launcher's log in which every 50th line has a loss, a log in which every line has one, and the same as JSON lines.
The whole command is timed, its start included. Rounds alternate in a new random order; the figures are medians. Processor time is
given too: others may be at work. Memory is the peak of the command, Python itself included, for a tenth of the log and for all.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.results import cpu_name, save

WORDS = (
    "worker loading shard data/part-00012.parquet tokens from cache queue thread 0x7f3a connection host started finished device"
    " cuda:0 memory 12.3GiB writing batch sequence length attention kernel compiled saved restored INFO bucket reducer rank"
).split()
MEMORY = """
import resource, sys
from nanproof.cli import app
try:
    app(["doctor", sys.argv[1], "--json"])
except SystemExit:
    pass
try:  # what getrusage says includes the process that started this one
    peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
except OSError:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(peak / 1024)
"""


def other(draw: random.Random, n: int) -> str:
    said = " ".join(draw.choices(WORDS, k=12))
    return f"[rank0]: 2026-05-18 16:{n // 60 % 60:02d}:{n % 60:02d},{n % 1000:03d} - trainer - INFO - {said}"


def titan(draw: random.Random, n: int) -> str:
    loss, norm = draw.random() * 3, draw.random()
    return (
        f"[rank0]: 2026-05-18 16:{n // 60 % 60:02d}:{n % 60:02d},{n % 1000:03d} - trainer - INFO - step: {n}  loss: {loss:8.5f}"
        f"  grad_norm: {norm:7.4f}  memory:  9.46GiB(64.99%)  tps: {7000 + n % 999}  mfu: 17.00%"
    )


def mixed(draw: random.Random) -> Iterator[str]:
    for n in range(1 << 62):
        yield titan(draw, n) if n % 50 == 0 else other(draw, n)


def dense(draw: random.Random) -> Iterator[str]:
    for n in range(1 << 62):
        yield titan(draw, n)


def json_lines(draw: random.Random) -> Iterator[str]:
    for n in range(1 << 62):
        values = {
            "loss": draw.random() * 3,
            "grad_norm": draw.random(),
            "learning_rate": 1e-4,
            "tokens": n * 8192,
            "epoch": n / 1e5,
        }
        yield json.dumps({"step": n, **values, "tokens_per_second": 7000 + n % 999, "memory": 9.46})


KINDS: dict[str, tuple[str, Callable[[random.Random], Iterator[str]]]] = {
    "one line in 50 has a loss": ("mixed.log", mixed),
    "every line has a loss": ("dense.log", dense),
    "every line has a loss, JSON lines": ("steps.jsonl", json_lines),
}


def write(path: Path, lines: Iterator[str], size: int) -> tuple[int, int]:
    """Bytes and lines that were written."""
    done = count = 0
    with open(path, "w", encoding="ascii", newline="\n") as file:
        while done < size:
            done += file.write(next(lines) + "\n")
            count += 1
    return done, count


def doctor(path: Path) -> None:
    """The whole command: starting it, reading, judging, printing."""
    subprocess.run([sys.executable, "-m", "nanproof", "doctor", str(path)], stdout=subprocess.DEVNULL, check=False)


def grep(path: Path) -> None:
    subprocess.run(["grep", "-c", "nan", str(path)], stdout=subprocess.DEVNULL, check=False)


def busy() -> float:
    """Seconds of processor time, of this process and those it started."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def memory(path: Path) -> float:
    """MiB at the peak."""
    done = subprocess.run([sys.executable, "-c", MEMORY, str(path)], check=True, capture_output=True, text=True)
    return float(done.stdout.splitlines()[-1])


def measured(kind: str, size: int, rounds: int, folder: Path) -> dict[str, Any]:
    name, make = KINDS[kind]
    path, tenth = folder / name, folder / f"tenth-{name}"
    wrote, lines = write(path, make(random.Random(0)), size)
    write(tenth, make(random.Random(0)), size // 10)
    ways: dict[str, Callable[[], Any]] = {"nanproof doctor": lambda: doctor(path), "grep -c nan": lambda: grep(path)}
    times: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in random.sample(list(ways), len(ways)):
            started, at_work = time.perf_counter(), busy()
            ways[way]()
            times[way].append((time.perf_counter() - started, busy() - at_work))
    rows = {}
    for way, found in times.items():
        seconds, cpu = (statistics.median(column) for column in zip(*found, strict=True))
        rows[way] = {
            "seconds": seconds,
            "MB/s": wrote / 1e6 / seconds,
            "CPU seconds": cpu,
            "MB per CPU second": wrote / 1e6 / max(cpu, 0.01),  # it is counted in hundredths
        }
    peaks = {"a tenth": memory(tenth), "all": memory(path)}
    result = {"bytes": wrote, "lines": lines, "rows": rows, "peak MiB": peaks}
    path.unlink()
    tenth.unlink()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/doctor.json")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            found = results[kind] = measured(kind, args.megabytes * 1_000_000, args.rounds, Path(folder))
            print(f"{kind}: {found['bytes'] / 1e6:.0f} MB, {found['lines']} lines")
            for way, row in found["rows"].items():
                rates = f"{row['MB/s']:8.0f} MB/s {row['MB per CPU second']:8.0f} MB per CPU second"
                print(f"  {way:20s} {row['seconds']:8.2f} s {rates}")
            peak = found["peak MiB"]
            print(f"  peak memory of the process: {peak['a tenth']:.0f} MiB for a tenth, {peak['all']:.0f} MiB for all\n")
    results["load average"] = os.getloadavg()[0]  # more than the cores means that others were at work
    if args.save:
        print(f"written to {save('doctor', f'{cpu_name()}, {os.cpu_count()} cores', results)}")


if __name__ == "__main__":
    main()
