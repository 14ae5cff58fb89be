"""What observing costs: whole steps as a ratio to the plain clipped step in the same run (a Llama, a ResNet-50, the Llama
compiled), host syncs, memory, the kernels' bandwidth, and, on any device, what is added to a light step by count.

The goals: at most 1.01 with `observe=True` on all three.

python -m benchmarks.observe            # on the device there is: about four minutes on an H200, three on two CPU cores
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import nanproof
from benchmarks.variants import LossFn, Step, compare, detect_anomaly, guard_train_step, plain, table, underflow_overflow
from nanproof.observe._kernels import TritonTable
from tools.results import RESULTS, cpu_name, save
from zoo.llama import Llama, llama, next_token_loss
from zoo.resnet import ResNet50, resnet

EVERYTHING = nanproof.Observe(modules="*", every=1)


def observed(observe: Any) -> Callable[[nn.Module, LossFn], Any]:
    @contextmanager
    def variant(model: nn.Module, loss_fn: LossFn) -> Iterator[Step]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        with (
            tempfile.TemporaryDirectory() as folder,
            nanproof.Guard(model, optimizer, loss_fn=loss_fn, run_dir=folder, observe=observe) as guard,
        ):

            def step(batch: Any) -> None:
                guard.train_step(batch)

            yield step
        assert not guard.incidents, guard.incidents
        assert guard.history[-1].observed is not None

    return variant


@contextmanager
def naive_hooks(model: nn.Module, loss_fn: LossFn) -> Iterator[Step]:
    """What people write: a forward hook on every module, a handful of torch reductions in it, read at the end of the step."""
    seen: dict[str, Tensor] = {}

    def hook_of(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                x = output.detach().float()
                bad = torch.isnan(x).sum() + torch.isinf(x).sum()
                seen[name] = torch.stack((x.abs().max(), x.square().mean().sqrt(), bad.float(), (x == 0).float().mean()))

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(hook_of(name))
    with plain(model, loss_fn) as one:

        def step(batch: Any) -> None:
            one(batch)
            torch.stack(list(seen.values())).tolist()

        yield step


VARIANTS = {
    "plain clip + step": plain,
    "nanproof, not observing": guard_train_step,
    "nanproof, observe=True": observed(True),
    "nanproof, full looks": observed(nanproof.Observe(every=1)),
    "nanproof, everything": observed(EVERYTHING),
    "naive hooks": naive_hooks,
    "DebugUnderflowOverflow": underflow_overflow,
    "detect_anomaly": detect_anomaly,
}


def autocast_loss(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast(batch.device.type, dtype=torch.bfloat16):
        return next_token_loss(model, batch)


def whole_step(rounds: int, device: str, names: list[str]) -> dict[str, Any]:
    def build() -> nn.Module:
        if device == "cuda":
            return llama("cuda")[0]
        torch.manual_seed(0)
        return Llama(hidden=256, layers=6, heads=4, kv_heads=4, intermediate=688, vocab=4096, length=64)

    batch = torch.randint(0, 32000, (8, 1024), device="cuda") if device == "cuda" else torch.randint(0, 4096, (4, 64))
    loss_fn = autocast_loss if device == "cuda" else next_token_loss
    steps = 10 if device == "cuda" else 3
    rows = compare(build, loss_fn, batch, rounds=rounds, steps=steps, names=names, device=device, variants=VARIANTS)
    count = sum(p.numel() for p in build().parameters())
    shape = " x ".join(map(str, batch.shape))
    title = (
        f"whole step, Llama of {count / 1e6:.0f} M fp32 parameters, {'bf16 autocast, ' if device == 'cuda' else ''}batch {shape}"
    )
    print(table(title, rows), flush=True)
    return {"title": title, "rows": rows}


FAST = ["plain clip + step", "nanproof, not observing", "nanproof, observe=True", "nanproof, full looks", "nanproof, everything"]


def sgd_plain(model: nn.Module, loss_fn: LossFn) -> Any:
    @contextmanager
    def variant() -> Iterator[Step]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True)

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        yield step

    return variant()


def sgd_guarded(observe: Any) -> Callable[[nn.Module, LossFn], Any]:
    @contextmanager
    def variant(model: nn.Module, loss_fn: LossFn) -> Iterator[Step]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4, fused=True)
        with (
            tempfile.TemporaryDirectory() as folder,
            nanproof.Guard(model, optimizer, loss_fn=loss_fn, run_dir=folder, observe=observe) as guard,
        ):

            def step(batch: Any) -> None:
                guard.train_step(batch)

            yield step
        assert not guard.incidents, guard.incidents

    return variant


SGD_VARIANTS = {
    "plain clip + step": sgd_plain,
    "nanproof, not observing": sgd_guarded(None),
    "nanproof, observe=True": sgd_guarded(True),
    "nanproof, full looks": sgd_guarded(nanproof.Observe(every=1)),
}


def classification_loss(model: nn.Module, batch: Any) -> Tensor:
    images, labels = batch
    with torch.autocast(images.device.type, dtype=torch.bfloat16, enabled=images.is_cuda):
        logits = model(images)
    return F.cross_entropy(logits.float(), labels)


def resnet_step(rounds: int, device: str) -> dict[str, Any]:
    """16 outputs of 13 to 103 MB, on a network whose step is short: SGD, bf16 autocast, channels last."""
    batch = resnet(device)[1]
    rows = compare(
        lambda: resnet(device)[0], classification_loss, batch,
        rounds=rounds, steps=10 if device == "cuda" else 3, names=list(SGD_VARIANTS), device=device, variants=SGD_VARIANTS,
    )  # fmt: skip
    shape = " x ".join(map(str, batch[0].shape))
    title = f"whole step, ResNet-50{', bf16 autocast' if device == 'cuda' else ' of an eighth of the width'}, batch {shape}"
    print(table(title, rows), flush=True)
    return {"title": title, "rows": rows}


class _Operations(TorchDispatchMode):
    """Counts aten operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def _python_calls(step: Callable[[], Any]) -> int:
    count = 0

    def called(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        step()
    finally:
        sys.setprofile(None)
    return count


def counts(device: str) -> dict[str, Any]:
    """What observing adds to one light step: Python calls, operations, kernels launched, bytes at the peak. These are not
    times, so they are the same on every machine."""
    tokens = torch.randint(0, 1000, (2, 16), device=device)
    image = torch.randn(8, 3, 64, 64, device=device), torch.randint(0, 1000, (8,), device=device)

    def deep() -> nn.Module:
        return Llama(hidden=32, layers=16, heads=2, kv_heads=2, intermediate=64, vocab=1000, length=16)

    cases: dict[str, tuple[Callable[[], nn.Module], LossFn, Any]] = {
        "Llama of 16 layers": (deep, next_token_loss, tokens),
        "ResNet-50": (lambda: ResNet50(8), classification_loss, image),
    }
    found: dict[str, Any] = {}
    for name, (build, loss_fn, batch) in cases.items():
        seen: dict[bool, dict[str, int]] = {}
        for observe in (False, True):
            torch.manual_seed(0)
            model = build().to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, fused=True)
            with nanproof.Guard(model, optimizer, loss_fn=loss_fn, observe=observe) as guard:

                def step(guard: nanproof.Guard = guard, batch: Any = batch) -> None:
                    guard.train_step(batch)

                for _ in range(43):  # past the early full looks
                    step()
                now = {"python_calls": _python_calls(step)}
                with _Operations() as operations:
                    step()
                now["operations"] = operations.count
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                    with profile(activities=[ProfilerActivity.CUDA]) as kernels:
                        step()
                        torch.cuda.synchronize()
                    now["kernels"] = sum(k.count for k in kernels.key_averages())
                    now["peak_bytes"] = torch.cuda.max_memory_allocated()
                seen[observe] = now
                sites = len(guard.history[-1].observed.sites) if guard.history[-1].observed is not None else 0
        added = {key: seen[True][key] - value for key, value in seen[False].items()}
        found[name] = {"sites": sites, "without": seen[False], "added": added}
        print(f"{name}, {sites} outputs, added to a light step: {added}", flush=True)
    return found


def host_time(rounds: int) -> dict[str, Any]:
    """A model of the same depth and next to no width: what a step costs the host, which is what counts where the device waits
    for it."""

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Llama(hidden=64, layers=16, heads=4, kv_heads=4, intermediate=128, vocab=1000, length=16).cuda()

    batch = torch.randint(0, 1000, (1, 16), device="cuda")
    rows = compare(build, autocast_loss, batch, rounds=rounds, steps=10, names=FAST, device="cuda", variants=VARIANTS)
    title = "the host's part of a step: the same 16 layers, hidden 64, batch 1 x 16"
    print(table(title, rows), flush=True)
    return {"title": title, "rows": rows}


def device_time(steps: int = 5) -> dict[str, Any]:
    """Milliseconds a step in which the device computes, summed over its kernels."""
    batch, rows = torch.randint(0, 32000, (8, 1024), device="cuda"), {}
    for name in FAST:
        with VARIANTS[name](llama("cuda")[0], autocast_loss) as step:
            for _ in range(3):
                step(batch)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                for _ in range(steps):
                    step(batch)
                torch.cuda.synchronize()
        kernels = seen.key_averages()
        looks = sum(k.self_device_time_total for k in kernels if k.key in ("_largest", "_look", "_gather", "_read"))
        ms = sum(k.self_device_time_total for k in kernels) / steps / 1e3
        rows[name] = {"ms": ms, "ratio": ms / rows[FAST[0]]["ms"] if rows else 1.0, "looks_ms": looks / steps / 1e3}
        print(
            f"{name:28s} {ms:8.2f} ms of kernels a step, {rows[name]['ratio']:.3f}; looks {looks / steps / 1e3:.2f} ms",
            flush=True,
        )
    return {"rows": rows}


def compiled(rounds: int, device: str) -> dict[str, Any]:
    """The same with torch.compile: each variant over a compiled model."""

    def build() -> nn.Module:
        model = llama(device)[0]
        model.compile()
        return model

    batch = llama(device)[1]
    loss_fn = autocast_loss if device == "cuda" else next_token_loss
    names = ["plain clip + step", "nanproof, not observing", "nanproof, observe=True"]
    steps = 10 if device == "cuda" else 2
    rows = compare(build, loss_fn, batch, rounds=rounds, steps=steps, names=names, device=device, variants=VARIANTS)
    title = "whole step, the same model compiled" if device == "cuda" else "whole step, Llama of 7 M parameters, compiled"
    print(table(title, rows), flush=True)
    return {"title": title, "rows": rows}


def no_syncs(steps: int = 100) -> dict[str, Any]:
    """Raises at the first operation that makes the host wait for the device."""
    batch, found = torch.randint(0, 32000, (8, 1024), device="cuda"), {}
    for name, observe in (("observe=True", True), ("everything", EVERYTHING)):
        model = llama("cuda")[0]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        with (
            tempfile.TemporaryDirectory() as folder,
            nanproof.Guard(model, optimizer, loss_fn=autocast_loss, run_dir=folder, observe=observe) as guard,
        ):
            for _ in range(3):
                guard.train_step(batch)
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(steps):
                    guard.train_step(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        full = sum(bool(r.observed and r.observed.outputs) for r in guard.history)
        assert len(guard.history) == steps + 3 and not guard.incidents and full
        found[name] = {"steps": steps, "full_looks": full, "syncs": 0}
        print(f"{name}: {steps} steps under set_sync_debug_mode('error'), {full} full looks: 0 host syncs", flush=True)
    return found


def look_at(looks: TritonTable, tensors: list[Tensor]) -> None:
    for row, x in enumerate(tensors):
        looks.look(x, row)
    looks.flush()


def bandwidth() -> dict[str, Any]:
    """Bytes read a second by looks at half a gigabyte, over that of a device-to-device copy (read and written)."""

    def seconds(f: Callable[[int], Any], repeat: int = 40) -> float:
        f(0)
        torch.cuda.synchronize()
        times = []
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for i in range(repeat):
                f(i)
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / repeat / 1e3)
        return statistics.median(times)

    def copy_ceiling() -> float:
        a, b = (torch.empty(1 << 28, device="cuda").normal_() for _ in range(2))
        return 2 * a.nbytes / seconds(lambda i: b.copy_(a), 10)

    ceiling = copy_ceiling()
    rows: dict[str, Any] = {}
    for mib, dtype in ((16, torch.bfloat16), (32, torch.float32), (512, torch.bfloat16), (512, torch.float32)):
        n, count = (mib << 20) // dtype.itemsize, max(1, 512 // mib)
        xs = [torch.empty(n, dtype=dtype, device="cuda").normal_() for _ in range(count)]
        looks = TritonTable(count, torch.device("cuda"))
        looks._most = 1 << 40
        for full in (False, True):
            looks.full = full
            took = seconds(lambda i, xs=xs, looks=looks: look_at(looks, xs)) / count  # type: ignore[misc]
            name = f"{count} x {mib} MiB {str(dtype)[6:]}, {'full' if full else 'light'}"
            rows[name] = {"us": took * 1e6, "TBps": (mib << 20) / took / 1e12, "of_copy": (mib << 20) / took / ceiling}
            line = (
                f"{name:30s} {took * 1e6:8.1f} us a tensor {rows[name]['TBps']:6.2f} TB/s  {rows[name]['of_copy']:.2f} of a copy"
            )
            print(line, flush=True)
        del xs, looks
    print(f"copy: {ceiling / 1e12:.2f} TB/s")
    return {"copy_TBps": ceiling / 1e12, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument(
        "--only", nargs="*",
        default=["bandwidth", "no host sync", "whole step", "resnet", "compiled", "device time", "host time", "counts"],
    )  # fmt: skip
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else f"{cpu_name()}, {torch.get_num_threads()} threads"
    torch.backends.cuda.matmul.allow_tf32 = True
    parts: dict[str, Callable[[], Any]] = {
        "bandwidth": bandwidth,
        "no host sync": no_syncs,
        "whole step": lambda: whole_step(args.rounds, device, args.variants),
        "device time": device_time,
        "host time": lambda: host_time(args.rounds),
        "resnet": lambda: resnet_step(args.rounds, device),
        "compiled": lambda: compiled(args.rounds, device),
        "counts": lambda: counts(device),
    }
    results: dict[str, Any] = {}
    anywhere = ("whole step", "resnet", "compiled", "counts")
    for part in args.only if device == "cuda" else [part for part in args.only if part in anywhere]:
        results[part] = parts[part]()
        path = save("observe_gpu" if device == "cuda" else "observe_cpu", name, results, args.out)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
