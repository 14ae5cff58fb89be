"""What keeping good states costs: copies in memory, checkpoints in the background, and the way back.

python -m benchmarks.recovery               # a 7 M Llama on the CPU, a 271 M one in bf16 autocast, batch 8 x 1024, on CUDA
python -m benchmarks.recovery --small       # only the small models with fast steps

Blocks of steps with and without alternate in one run. The figure is the extra time of one copy or one save, in training steps,
and what that is as a share of all steps at a stated interval.

A small model's steps are short and its host is busy: what a save does in the training process delays it. Models of 49 to 497
tensors are saved by the process that writes checkpoints, and by the thread that writes where there can be no process. Beside
the seconds stands the processor time that the training process itself spent, all of its threads together. On a machine that
others use too, that is the figure to trust.
"""

from __future__ import annotations

import argparse
import logging
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nanproof
from tools.results import RESULTS, save
from zoo.llama import llama, next_token_loss


def autocast_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    device = tokens.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        return next_token_loss(model, tokens)


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


class Bench:
    """One model and optimizer under guards that keep different things, one after the other."""

    def __init__(self, device: str, layers: int = 0) -> None:
        """`layers`: of a small model, instead of a Llama."""
        self.device = device
        self.loss = small_loss if layers else autocast_loss
        self.model, self.tokens = small(device, layers) if layers else llama(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.folder = Path(tempfile.mkdtemp())
        self.step_seconds: list[float] = []

    def guard(self, every: int = 0, to: str = "host", disk: int = 0, background: bool = True) -> nanproof.Guard:
        policy = nanproof.Policy(snapshot_every=every, snapshot_to=to, diagnose="never")  # type: ignore[arg-type]
        where = nanproof.Checkpoints(self.folder, every=disk, keep=1, prove=2, background=background) if disk else None
        return nanproof.Guard(self.model, self.optimizer, loss_fn=self.loss, policy=policy, checkpoints=where)

    def block(self, guard: nanproof.Guard, steps: int) -> float:
        """Seconds for so many steps. What is still being written at the end is not waited for."""
        wait(self.device)
        start = time.perf_counter()
        for _ in range(steps):
            guard.train_step(self.tokens)
        wait(self.device)
        return time.perf_counter() - start

    def extra(self, steps: int, rounds: int, thread: bool = False, **kept: Any) -> dict[str, float]:
        """The extra time of one copy or save: blocks with one in it against blocks without, in alternation."""
        plain, keeping = self.guard(), self.guard(**kept)
        saver = keeping.parts.recovery.saver
        if saver is not None and thread:
            saver.writer = None
        self.block(plain, 3)
        # Memory is taken here; and the next copy is due early in a block, so that all of its cost falls into it.
        self.block(keeping, (1 if "disk" in kept else 3) * steps + steps - steps // 10)
        if saver is not None:
            saver.wait()
            if saver.writer is not None and not saver.writer.ready(lambda: False):
                raise SystemExit("no process that writes checkpoints could be started")
        without, with_one, busy = [], [], []
        for _ in range(rounds):
            start = time.process_time()
            without.append(self.block(plain, steps))
            middle = time.process_time()
            with_one.append(self.block(keeping, steps))
            if saver is not None:
                saver.wait()
            busy.append((middle - start, time.process_time() - middle))
        step = statistics.median(without) / steps
        more = statistics.median(b - a for a, b in zip(without, with_one, strict=True))
        own_step = statistics.median(a for a, _ in busy) / steps
        own_more = statistics.median(b - a for a, b in busy)
        self.step_seconds.append(step)
        plain.close()
        keeping.close()
        return {
            "step ms": step * 1e3,
            "extra ms": more * 1e3,
            "extra steps": more / step,
            "extra processor ms": own_more * 1e3,
            "extra processor steps": own_more / own_step,
        }

    def save_seconds(self) -> float:
        """From the copy to the renamed folder, with training waiting."""
        guard = self.guard(disk=1, background=False)
        guard.train_step(self.tokens)
        guard.sync()
        wait(self.device)
        start = time.perf_counter()
        guard.train_step(self.tokens)
        guard.sync()
        spent = time.perf_counter() - start
        guard.close()
        return spent

    def rewind_seconds(self) -> dict[str, float]:
        """From a poisoned weight to the first step taken again."""
        found = {}
        for name, kept, steps in (("memory", {"every": 5}, 32), ("disk", {"disk": 10, "background": False}, 14)):
            guard = self.guard(**kept)  # type: ignore[arg-type]
            self.block(guard, steps)  # all the memory it will use is taken by then
            with torch.no_grad():
                next(iter(self.model.parameters()))[0, 0] = float("nan")
            wait(self.device)
            start = time.perf_counter()
            while not guard.incidents:
                guard.train_step(self.tokens)
            wait(self.device)
            found[name] = time.perf_counter() - start
            assert guard.incidents[0].action == ("rewound" if name == "memory" else "rolled-back"), guard.incidents
            guard.close()
        return found

    def resume_seconds(self) -> float:
        """From the checkpoint that was gone back to before."""
        fresh = self.guard(disk=5)
        wait(self.device)
        start = time.perf_counter()
        assert fresh.resume() > 0
        wait(self.device)
        spent = time.perf_counter() - start
        fresh.close()
        self.clear()
        return spent

    def clear(self) -> None:
        for path in self.folder.glob("step-*"):
            shutil.rmtree(path, ignore_errors=True)


def small(device: str, layers: int) -> tuple[nn.Module, Tensor]:
    """Many small tensors: eight for each layer, with Adam's."""
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(64, 64), nn.Tanh())))
    return model.to(device), torch.randn(32, 64, device=device)


def small_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return (model(batch) - batch).square().mean()


def measure_small(device: str, rounds: int) -> dict[str, dict[str, float]]:
    """One save of small models, by the process and by the thread. Training takes one core: with a training that takes all
    of them, whoever writes takes its time from it."""
    rows, threads = {}, torch.get_num_threads()
    torch.set_num_threads(1)
    for layers in (6, 12, 31, 62):
        for who in ("process", "thread"):
            bench = Bench(device, layers)
            steps = 200 if layers < 20 else 100  # longer than a save takes
            name = f"{8 * layers + 1} tensors, written by a {who}"
            rows[name] = bench.extra(steps, rounds, disk=steps, thread=who == "thread")
            print(f"{name:44} {rows[name]}", flush=True)
            shutil.rmtree(bench.folder, ignore_errors=True)
    torch.set_num_threads(threads)
    return rows


def measure(device: str, rounds: int, steps: int) -> dict[str, Any]:
    bench = Bench(device)
    rows: dict[str, dict[str, float]] = {}

    def add(name: str, make: Callable[[], dict[str, float]]) -> None:
        rows[name] = make()
        print(f"{name:44} {rows[name]}", flush=True)

    add("copy to host memory", lambda: bench.extra(steps, rounds, every=steps))
    if device == "cuda":
        add("copy to device memory", lambda: bench.extra(steps, rounds, every=steps, to="device"))
    long = 6 * steps if device == "cuda" else 4 * steps
    add("checkpoint, written in the background", lambda: bench.extra(long, rounds, disk=long))
    bench.clear()
    size = sum(t.nbytes for t in bench.guard().parts.recovery.state.tensors().values())
    result = {
        "parameters": sum(p.numel() for p in bench.model.parameters()),
        "state bytes": size,
        "steps a block": {"copy": steps, "checkpoint": long},
        "rows": rows,
        "small": measure_small(device, rounds),
        "seconds to save, training waiting": bench.save_seconds(),
        "seconds from a poisoned weight to training again": bench.rewind_seconds(),
        "seconds to resume": bench.resume_seconds(),
    }
    bench.clear()
    for name in ("seconds to save, training waiting", "seconds from a poisoned weight to training again", "seconds to resume"):
        print(f"{name:50} {result[name]}", flush=True)
    shutil.rmtree(bench.folder, ignore_errors=True)
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=None, help="steps between copies in a block")
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON; benchmarks/results if not given")
    parser.add_argument("--small", action="store_true", help="only the small models; nothing is recorded")
    options = parser.parse_args()
    logging.getLogger("nanproof").setLevel(logging.ERROR)
    on = "cuda" if torch.cuda.is_available() else "cpu"
    if options.small:
        measure_small(on, options.rounds)
        raise SystemExit
    found = measure(on, options.rounds, options.steps or (20 if on == "cuda" else 5))
    name = torch.cuda.get_device_name() if on == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    save(f"recovery_{'gpu' if on == 'cuda' else 'cpu'}", name, found, options.out or RESULTS)
