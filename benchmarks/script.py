"""What `nanproof run` costs in loops of 2 to 12 ms a step: `python -m benchmarks.script [--save]`, two minutes on a CPU.

The loops in `benchmarks/loops` are written as strangers write them, and know nothing of nanproof. Each runs twice at once,
plain and under `nanproof run`, in processes that are stopped and continued in turn, so that both meet the same machine. A loop
notes the processor time of each of its steps. The figure is the median step after the first 50, over the plain one of the
same round.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tools.results import RESULTS, cpu_name, save

LOOPS = Path(__file__).parent / "loops"
FIRST = 50
"""Steps before the steady state."""
TURN = 0.15
"""Seconds that a process runs before the other one does."""
VARIANTS: dict[str, list[str]] = {"plain": [], "nanproof run": ["-m", "nanproof", "run", "--quiet"]}


def one_round(script: Path, steps: int) -> dict[str, list[float]]:
    """Seconds of each step, plain and guarded, run in turns."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        running = {}
        for name, through in VARIANTS.items():
            out = (Path(folder) / name).open("w+")
            command = [sys.executable, "-W", "ignore", *through, str(script), str(steps)]
            running[name] = subprocess.Popen(command, stdout=out, env=environment), out
            running[name][0].send_signal(signal.SIGSTOP)
        try:
            while any(process.poll() is None for process, _ in running.values()):
                for process, _ in running.values():
                    if process.poll() is None:
                        process.send_signal(signal.SIGCONT)
                        until = time.monotonic() + TURN
                        while process.poll() is None and time.monotonic() < until:
                            time.sleep(0.01)
                        process.send_signal(signal.SIGSTOP)
        finally:
            for process, _ in running.values():
                if process.poll() is None:
                    process.kill()
        found = {}
        for name, (process, out) in running.items():
            out.seek(0)
            if process.returncode:
                raise SystemExit(f"{script.name} ended with {process.returncode}, {name}")
            found[name] = json.loads(out.read().strip().splitlines()[-1])
            out.close()
    return found


def compare(script: Path, steps: int, rounds: int) -> dict[str, dict[str, float]]:
    """Milliseconds of a step, and the ratio to plain, over rounds."""
    medians: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name, taken in one_round(script, steps).items():
            medians[name].append(1e3 * statistics.median(taken[FIRST:]))
    rows = {}
    for name, values in medians.items():
        ratios = sorted(a / b for a, b in zip(values, medians["plain"], strict=True))
        rows[name] = {
            "ms": statistics.median(values),
            "ratio": statistics.median(ratios),
            "low": ratios[len(ratios) // 4],
            "high": ratios[(3 * len(ratios)) // 4],
            "rounds": rounds,
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loops", nargs="*", help="names of loops; all if none is named")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for script in sorted(LOOPS.glob("*.py")):
        if script.stem == "__init__" or (args.loops and script.stem not in args.loops):
            continue
        rows = compare(script, args.steps, args.rounds)
        results[script.stem] = {"rows": rows}
        for name, row in rows.items():
            print(f"{script.stem:12s} {name:14s} {row['ms']:7.3f} ms {row['ratio']:6.3f}   {row['low']:.3f}-{row['high']:.3f}")
        sys.stdout.flush()
    if args.save:
        print(f"written to {save('script_cpu', f'{cpu_name()}, 1 thread', results, args.out)}")


if __name__ == "__main__":
    main()
