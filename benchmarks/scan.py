"""How fast a scan is: beside `cat`, which only reads, and beside the line people write to look for NaN.

python -m benchmarks.scan --save    # two files of 2 GB from a warm page cache; writes benchmarks/results/scan.json

Rounds alternate, in a new random order each; the figures are medians. `nanproof scan` is timed as a function and as a command,
which includes starting Python and importing torch. Memory is what a process that only scans has in anonymous pages at its peak,
above what it had after importing.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from nanproof import scan
from nanproof.scan._scan import crc32
from tools.results import cpu_name, save

MEMORY = """
import json, sys, threading, time
from nanproof import scan
import safetensors.torch

def anonymous():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon"))

before, peak, done = anonymous(), 0, threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.001)

thread = threading.Thread(target=watch)
thread.start()
scan([sys.argv[1]])
done.set()
thread.join()
print(json.dumps({"before": before / 1024, "peak": peak / 1024}))
"""


def tensors(dtype: torch.dtype, size: int) -> dict[str, Tensor]:
    """A model's worth of matrices of 64 MB, and many small vectors."""
    torch.manual_seed(0)
    rows = (64 << 20) // dtype.itemsize // 4096
    made = {f"layers.{n}.weight": torch.randn(rows, 4096, dtype=dtype) for n in range(size // (64 << 20))}
    return made | {f"layers.{n}.norm": torch.randn(4096, dtype=dtype) for n in range(200)}


def cat(path: Path) -> None:
    subprocess.run(["sh", "-c", 'cat "$0" > /dev/null', str(path)], check=True)


def one_line(path: Path, mmap: bool) -> None:
    assert not any(torch.isnan(p).any() for p in torch.load(path, mmap=mmap).values())


def clean(path: Path) -> None:
    assert scan([path]).status == "clean"


def command(path: Path) -> None:
    subprocess.run([sys.executable, "-m", "nanproof", "scan", str(path)], check=True, stdout=subprocess.DEVNULL)


def measured(dtype: torch.dtype, size: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        safe, plain = Path(folder) / "model.safetensors", Path(folder) / "model.pt"
        made = tensors(dtype, size)
        save_file(made, safe)
        torch.save(made, plain)
        del made
        ways: dict[str, Callable[[], Any]] = {
            "cat file > /dev/null": lambda: cat(safe),
            "scan, safetensors": lambda: clean(safe),
            "scan, torch.save": lambda: clean(plain),
            "nanproof scan, as a command": lambda: command(safe),
            "crc32 of the file alone": lambda: crc32(safe),
            "any(isnan(p).any()), torch.load": lambda: one_line(plain, False),
            "any(isnan(p).any()), torch.load(mmap=True)": lambda: one_line(plain, True),
        }
        for way in ways.values():
            way()  # everything is in the page cache, and every import done
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name in random.sample(list(ways), len(ways)):
                started = time.perf_counter()
                ways[name]()
                times[name].append(time.perf_counter() - started)
        size = safe.stat().st_size
        memory = json.loads(
            subprocess.run([sys.executable, "-c", MEMORY, safe], check=True, capture_output=True, text=True).stdout
        )
    seconds = {name: statistics.median(found) for name, found in times.items()}
    reading = seconds["cat file > /dev/null"]
    rows = {name: {"seconds": s, "ratio": s / reading, "GB/s": size / 1e9 / s} for name, s in seconds.items()}
    return {"bytes": size, "rounds": rounds, "rows": rows, "anonymous MiB above import": memory["peak"] - memory["before"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/scan.json")
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        found = results[name] = measured(dtype, int(args.gigabytes * 1e9), args.rounds)
        print(f"{name}, {found['bytes'] / 1e9:.2f} GB, {found['rounds']} rounds")
        print(f"{'':44s} {'seconds':>8s} {'ratio':>7s} {'GB/s':>6s}")
        for row, value in found["rows"].items():
            print(f"{row:44s} {value['seconds']:8.3f} {value['ratio']:7.2f} {value['GB/s']:6.1f}")
        print(f"anonymous memory: {found['anonymous MiB above import']:.0f} MiB above that of the imports\n")
    results["load average"] = os.getloadavg()[0]  # more than the cores means that others were at work
    if args.save:
        print(f"written to {save('scan', f'{cpu_name()}, {os.cpu_count()} cores', results)}")


if __name__ == "__main__":
    main()
