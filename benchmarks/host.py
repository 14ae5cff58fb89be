"""The host's time of the optimizer's part, by the number of tensors: guard.step against clip_grad_norm_ + a fused AdamW step.

python -m benchmarks.host            # two minutes; writes benchmarks/results/host_cpu.json or host_gpu.json

Each round times every variant once, in a new random order, on parameters and gradients of its own. The figure is the median over
rounds of a variant's time over the plain time of the same round. On CUDA the device is idle when a call begins, and the time is
that until the call returns. Beside them stabilityguard and arc-training, without what they do in hooks during backward.
torch.autograd.detect_anomaly is not here: it looks at backward passes, and this part has none; benchmarks.cpu has it.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nanproof
from benchmarks.variants import facts_of, guard_facts, other_parts
from tools.results import RESULTS, add, cpu_name

Step = Callable[[], Any]


class Tensors(nn.Module):
    """Small parameters with gradients, in blocks of ten as in a model."""

    def __init__(self, count: int, size: int, device: str) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        blocks = [min(10, count - start) for start in range(0, count, 10)]
        self.blocks = nn.ModuleList(
            nn.ParameterList(torch.randn(size, generator=generator) for _ in range(block)) for block in blocks
        )
        self.to(device)
        for p in self.parameters():
            p.grad = torch.randn(size, generator=generator).to(device)


def variants(count: int, size: int, device: str, stack: ExitStack, capture: bool) -> dict[str, Step]:
    """The optimizer's part, each on tensors of its own."""
    loss = torch.tensor(2.0, device=device)

    def made() -> tuple[Tensors, torch.optim.Optimizer]:
        model = Tensors(count, size, device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def guarded(**options: Any) -> Step:
        model, optimizer = made()
        guard = stack.enter_context(nanproof.Guard(model, optimizer, **options))

        def step() -> None:
            guard.step(loss)

        step.facts = partial(guard_facts, guard)  # type: ignore[attr-defined]
        return step

    model, optimizer = made()
    parameters = list(model.parameters())

    def plain() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    other, other_optimizer = made()
    others = list(other.parameters())

    def isnan_loop() -> None:
        if not any(bool(torch.isnan(p.grad).any()) for p in others if p.grad is not None):
            torch.nn.utils.clip_grad_norm_(others, 1.0)
            other_optimizer.step()

    found: dict[str, Step] = {
        "plain clip + step": plain,
        "nanproof guard.step": guarded(),
        "nanproof guard.step, run_dir": guarded(run_dir=stack.enter_context(tempfile.TemporaryDirectory())),
        "isnan loop": isnan_loop,
    }
    if capture:
        found["nanproof guard.step, capture"] = guarded(policy=nanproof.Policy(capture=True))
    return found | other_parts(made, loss, stack)


def measure(count: int, size: int, device: str, rounds: int, capture: bool = False) -> dict[str, dict[str, Any]]:
    """Milliseconds of the host, and the median ratio to plain, of each variant."""
    order = random.Random(0)
    with ExitStack() as stack:
        steps = variants(count, size, device, stack, capture)
        times: dict[str, list[float]] = {name: [] for name in steps}
        for step in steps.values():
            for _ in range(10):
                step()
        gc.collect()
        gc.disable()
        for _ in range(rounds):
            names = list(steps)
            order.shuffle(names)
            for name in names:
                step, taken = steps[name], []
                for _ in range(5):
                    if device != "cpu":
                        torch.cuda.synchronize()
                    start = time.perf_counter()
                    step()
                    taken.append(time.perf_counter() - start)
                times[name].append(statistics.median(taken))
        gc.enable()
        facts = {name: facts_of(step) for name, step in steps.items()}
    base = times["plain clip + step"]
    rows = {}
    for name, values in times.items():
        ratios = sorted(v / b for v, b in zip(values, base, strict=True))
        rows[name] = {
            "ms": 1e3 * statistics.median(values),
            "ratio": statistics.median(ratios),
            "low": ratios[rounds // 4],
            "high": ratios[3 * rounds // 4],
            "rounds": rounds,
            **facts[name],
        }
    return rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--counts", type=int, nargs="*", default=[50, 57, 500, 5000])
    parser.add_argument("--size", type=int, default=256, help="elements of each tensor")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--capture", action=argparse.BooleanOptionalAction, default=True, help="Policy(capture=True) too, on CUDA"
    )
    args = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)
    results = {}
    for count in args.counts:
        rounds = max(8, min(args.rounds, args.rounds * 500 // count))
        rows = measure(count, args.size, device, rounds, args.capture and device == "cuda")
        title = f"host time of the optimizer's part, {count} tensors of {args.size} numbers, AdamW"
        print(title)
        for name, row in rows.items():
            print(f"{name:32s} {row['ms']:9.3f} ms {row['ratio']:7.3f}   {row['low']:.3f}-{row['high']:.3f} ({row['rounds']})")
            if "replays" in row:
                print(f"  {row['path']}; {row['replays']} replays")
        results[str(count)] = {"title": title, "rows": rows}
    name = torch.cuda.get_device_name() if device == "cuda" else f"{cpu_name()}, 1 thread"
    print(f"written to {add('host_gpu' if device == 'cuda' else 'host_cpu', name, results, args.out)}")


if __name__ == "__main__":
    main()
