"""The fuzzer: every reader, thousands of files that are not quite what they should be.

    python -m fuzz --mutations 10000 --seed 0        (tests/ on the path; `make fuzz` does it)

A case fails if something in the file was executed, if an undocumented exception or a traceback came out, if it took more than
10 seconds or 512 MiB, or if the process died. Cases are the same for the same seed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from fuzz.campaign import campaign
from tools.results import cpu_name, save


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mutations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--reader", default="", help="only this one")
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/fuzz.json")
    given = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        tallies = campaign(
            Path(folder), given.mutations, given.seed, given.reader, say=lambda text: print(text, flush=True), jobs=given.jobs
        )
    total: Counter[str] = Counter()
    for reader, tally in tallies.items():
        row = tally.facts()
        total.update({name: row[name] for name in ("cases", "executed", "errors", "slow", "memory", "died")})
        print(f"{reader:10}", *(f"{name} {value}" for name, value in row.items()))
    print("all:", dict(total), f"in {time.perf_counter() - began:.0f} s")
    if given.save:
        readers = {reader: tally.facts() for reader, tally in tallies.items()}
        limit = {"seconds": 10, "mebibytes": 512}
        print(save("fuzz", cpu_name(), {"seed": given.seed, "limits": limit, "all": dict(total), "readers": readers}))
    return int(any(total[name] for name in ("executed", "errors", "slow", "memory", "died")))


if __name__ == "__main__":
    sys.exit(main())
