"""What finding out costs: locating the birth of a bad step, the whole diagnosis, and what the recorder costs while all is well.

python -m benchmarks.explain               # a 7 M Llama on the CPU, a 271 M one in bf16 autocast, batch 8 x 1024, on CUDA
python -m benchmarks.explain --only tensors     # a bad step of 5,000 small tensors, on one core

Forward + backward of the same step, run in the same process, is 1. For the many tensors it is a healthy step.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nanproof
from nanproof.core.support._context import Mode, RandomState
from nanproof.explain._case import Case
from nanproof.explain._diagnose import explain
from nanproof.explain.locate._locate import locate, survey
from nanproof.explain.replay._recorder import Recorder
from nanproof.explain.replay._replay import Replay
from tools.results import cpu_name, save
from zoo import many_tensors
from zoo.llama import llama

SAMPLE, TOKEN = 3, 17


class DividesByCount(nn.Module):
    """A layer's output over a count that is 0 at one token: Inf in the middle of the forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.bad = inner, False

    def forward(self, x: Tensor) -> Tensor:
        count = torch.ones(x.shape[:2], device=x.device, dtype=x.dtype)
        count[SAMPLE, TOKEN] -= float(self.bad)
        return self.inner(x) / count[..., None]


class TakesARoot(nn.Module):
    """Adds a root of 0 at one token: the forward is finite, the gradient is born bad in the middle of the backward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.bad = inner, False

    def forward(self, x: Tensor) -> Tensor:
        out = self.inner(x)
        keep = torch.ones(x.shape[:2], device=x.device, dtype=out.dtype)
        keep[SAMPLE, TOKEN] -= float(self.bad)
        return out + 1e-3 * ((out * keep[..., None]).square().sum(-1, keepdim=True) + (0.0 if self.bad else 1e-6)).sqrt()


class MeansOverNothing(nn.Module):
    """The loss's own code: a masked mean whose mask is empty for one sample."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.bad = inner, False

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


FAULTS: dict[str, type[nn.Module]] = {
    "forward, in a layer": DividesByCount,
    "backward, in a layer": TakesARoot,
    "forward, in the loss": MeansOverNothing,
}
EXPECTED = {
    "forward, in a layer": "zero-denominator",
    "backward, in a layer": "sqrt-at-zero",
    "forward, in the loss": "zero-denominator",
}


def loss_of(fault: nn.Module, device: str) -> Callable[[nn.Module, Tensor], Tensor]:
    def loss_fn(model: nn.Module, tokens: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(tokens)
        each = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten(), reduction="none")
        each = each.view(len(tokens), -1)
        mask = torch.ones_like(each)
        if isinstance(fault, MeansOverNothing) and fault.bad:
            mask[SAMPLE] = 0
        return ((each * mask).sum(1) / mask.sum(1)).mean()

    return loss_fn


def seconds(f: Callable[[], Any], device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    f()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def one_fault(name: str, device: str, rounds: int) -> dict[str, Any]:
    model, tokens = llama(device)
    middle = model.layers[len(model.layers) // 2]
    fault = FAULTS[name](middle.mlp_norm)
    middle.mlp_norm = fault
    loss_fn = loss_of(fault, device)
    replay = Replay(model, loss_fn, [tokens])

    def plain() -> None:
        loss_fn(model, tokens).backward()
        model.zero_grad()

    for _ in range(3):
        plain()
    base, found, whole = [], [], []
    cause = place = ""
    fault.bad = True
    for _ in range(rounds):
        base.append(seconds(plain, device))

        def look() -> None:
            nonlocal place
            birth = locate(replay, *survey(replay, forward="backward" not in name))
            assert birth is not None
            place = f"{birth.op.name} in {birth.op.path}, samples {birth.samples}, tokens {birth.tokens}"

        found.append(seconds(look, device))

        def all_of_it() -> None:
            nonlocal cause
            told = explain(Case("nonfinite-gradient" if "backward" in name else "nonfinite-loss", replay=replay))
            cause = f"{told.cause}, {'verified' if told.verified else 'not verified'}"

        whole.append(seconds(all_of_it, device))
    fault.bad = False
    once = statistics.median(base)
    row = {
        "forward + backward, ms": 1e3 * once,
        "locate, ms": 1e3 * statistics.median(found),
        "locate, ratio": statistics.median(found) / once,
        "diagnosis, ms": 1e3 * statistics.median(whole),
        "diagnosis, ratio": statistics.median(whole) / once,
        "place": place,
        "cause": cause,
        "right": cause == f"{EXPECTED[name]}, verified",
        "guard: bad step to report, ms": 1e3 * guarded(model, tokens, loss_fn, fault, device),
    }
    print(
        f"{name}: forward + backward {row['forward + backward, ms']:.1f} ms, locate {row['locate, ratio']:.2f}, "
        f"whole diagnosis {row['diagnosis, ratio']:.2f}; in the guard {row['guard: bad step to report, ms']:.0f} ms "
        f"from the bad step to the report. {place}. {cause}",
        flush=True,
    )
    return row


def guarded(model: nn.Module, tokens: Tensor, loss_fn: Any, fault: Any, device: str) -> float:
    """Time from the start of the bad step to its reported incident, bundle and put-back included."""
    log = logging.getLogger("nanproof")
    level = log.level
    log.setLevel(logging.CRITICAL)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            guard = nanproof.Guard(model, optimizer, loss_fn=loss_fn, run_dir=folder)
            for _ in range(5):
                guard.train_step(tokens)
            guard.sync()
            fault.bad = True

            def bad() -> None:
                guard.train_step(tokens)
                guard.sync()

            took = seconds(bad, device)
            fault.bad = False
            guard.close()
            assert guard.incidents and guard.incidents[0].diagnosis is not None
        return took
    finally:
        log.setLevel(level)


def recorder(device: str) -> dict[str, float]:
    """Microseconds a step on the healthy path: random states and the batch by reference."""
    import numpy as np

    model = nn.Linear(4, 4).to(device)
    modules, where = list(model.modules()), next(model.parameters()).device
    devices = [where] if device == "cuda" else []
    batch = ({"input_ids": torch.zeros(8, 128, device=device), "labels": torch.zeros(8, 128), "mask": torch.zeros(8, 128)},)
    kept, mode = Recorder(), Mode.now(modules, where)

    def step() -> None:
        kept.keep(0, batch, RandomState.now(devices), mode)

    def microseconds(f: Callable[[], Any]) -> float:
        runs = []
        for _ in range(7):
            start = time.perf_counter()
            for _ in range(500):
                f()
            runs.append((time.perf_counter() - start) / 500 * 1e6)
        return statistics.median(runs)

    def moving() -> None:
        np.random.rand()  # noqa: NPY002
        step()

    draw = microseconds(lambda: np.random.rand())  # noqa: NPY002
    found = {"NumPy idle": microseconds(step), "NumPy drawn from in every step": microseconds(moving) - draw}
    print("recorder, microseconds a step:", {k: round(v, 1) for k, v in found.items()}, flush=True)
    return found


def bad_steps(tensors: int, rounds: int) -> dict[str, Any]:
    """A bad step of a model of so many tensors, bundle included, beside its healthy steps. Seconds, and processor seconds of the
    training thread, which other programs do not disturb."""
    rows: dict[str, Any] = {}
    log = logging.getLogger("nanproof")
    level, threads = log.level, torch.get_num_threads()
    log.setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    try:
        for name, fault in many_tensors.FAULTS.items():
            healthy, bad = [], []
            for _ in range(rounds):
                steps, last, right = one_bad_step(tensors, fault)
                healthy += steps
                bad.append(last)
            normal = [statistics.median(column) for column in zip(*healthy, strict=True)]
            took = [statistics.median(column) for column in zip(*bad, strict=True)]
            rows[name] = {
                "healthy step, s": normal[0],
                "bad step, s": took[0],
                "bad step, processor s": took[1],
                "ratio of processor s": took[1] / normal[1],
                "right": right,
            }
            print(
                f"{tensors} tensors, {name}: {took[0]:.2f} s ({took[1]:.2f} of the processor), a healthy step {normal[0]:.2f} s "
                f"({normal[1]:.2f}); {took[1] / normal[1]:.1f} times; {'right' if right else 'WRONG'}",
                flush=True,
            )
    finally:
        log.setLevel(level)
        torch.set_num_threads(threads)
    return rows


def one_bad_step(tensors: int, fault: many_tensors.Fault) -> tuple[list[tuple[float, float]], tuple[float, float], bool]:
    """(seconds, processor seconds) of healthy steps, then of the bad one, and whether what is said about it is right."""
    torch.manual_seed(0)
    model = many_tensors.ManyTensors(tensors)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    took = []
    with tempfile.TemporaryDirectory() as folder:
        guard = nanproof.Guard(model, optimizer, loss_fn=many_tensors.loss_fn, run_dir=folder)
        for i in range(7):
            batch = torch.randn(4, 8)
            if i == 6:
                batch = fault.spoil(model, batch)
            start = time.perf_counter(), time.thread_time()
            guard.train_step(batch)
            took.append((time.perf_counter() - start[0], time.thread_time() - start[1]))
        guard.close()
    said = guard.incidents[0].diagnosis if guard.incidents else None
    right = said is not None and (said.cause, said.op, said.where) == (fault.cause, fault.op, fault.where)
    return took[2:6], took[6], right and said is not None and (said.verified, said.samples) == (fault.verified, fault.samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=5000)
    parser.add_argument("--only", choices=("faults", "tensors"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    if args.device == "cpu" and args.only != "faults":
        rows = bad_steps(args.tensors, min(args.rounds, 3))
        print(f"written to {save('bad_step', f'{cpu_name()}, 1 thread', {'tensors': args.tensors, 'faults': rows}, args.out)}")
    if args.only == "tensors":
        return
    faults = {name: one_fault(name, args.device, args.rounds) for name in FAULTS}
    results = {"faults": faults, "recorder": recorder(args.device)}
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"written to {save('explain_' + ('gpu' if args.device == 'cuda' else 'cpu'), where, results, args.out)}")


if __name__ == "__main__":
    main()
