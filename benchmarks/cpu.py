"""What the guard costs on a CPU: whole steps of a small Llama, each a ratio to plain clip + fused step in the same run.

python -m benchmarks.cpu            # two minutes; writes benchmarks/results/cpu.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

from benchmarks.variants import VARIANTS, compare, table
from tools.results import RESULTS, cpu_name, save
from zoo.llama import Llama, next_token_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", nargs="*", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Llama(hidden=256, layers=6, heads=4, kv_heads=4, intermediate=688, vocab=4096, length=64)

    parameters = sum(p.numel() for p in build().parameters())
    batch = torch.randint(0, 4096, (4, 64))
    rows = compare(build, next_token_loss, batch, rounds=args.rounds, steps=2, names=args.only)
    title = f"whole step, Llama of {parameters / 1e6:.1f} M fp32 parameters, batch 4 x 64, {torch.get_num_threads()} threads"
    print(table(title, rows))
    path = save(
        "cpu", f"{cpu_name()}, {torch.get_num_threads()} threads", {"whole step": {"title": title, "rows": rows}}, args.out
    )
    print(f"written to {path}")


if __name__ == "__main__":
    main()
