"""What the guard costs on a CUDA device, in one call: prints one table and writes JSON.

python -m benchmarks.gpu --out DIR        # about five minutes on an H200

1. The optimizer's part alone, 1.1 B fp32 parameters: clip + fused AdamW against guard.step and what the bandwidth allows.
2. Whole steps of a 271 M Llama in bf16 autocast, all telemetry on, beside other tools; and with Muon + AdamW.
3. 200 guarded steps under torch.cuda.set_sync_debug_mode("error"): no host sync.
4. What a bad step costs.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nanproof
from benchmarks.adamw_kernel import AdamWKernel
from benchmarks.variants import MUON, VARIANTS, compare, muon_and_adamw, table
from tools.results import save
from zoo.llama import Llama, next_token_loss


def autocast_loss(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return next_token_loss(model, batch)


def small_llama() -> nn.Module:
    torch.manual_seed(0)
    return Llama(hidden=1024, layers=16, heads=16, kv_heads=16, intermediate=2816, vocab=32000, length=1024).cuda()


def milliseconds(f: Callable[[], Any], repeat: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(repeat):
        f()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / repeat


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a large device-to-device copy."""
    a = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    b = torch.empty_like(a)
    b.copy_(a)
    return 2 * a.nbytes / (milliseconds(lambda: b.copy_(a), 10) / 1e3)


def optimizer_part(rounds: int) -> dict[str, Any]:
    """All variants on the same parameters and gradients, in alternating rounds."""
    with torch.device("cuda"):
        model = Llama(hidden=2048, layers=22, heads=32, kv_heads=4, intermediate=5632, vocab=32000, length=2048)
    parameters = list(model.parameters())
    for p in parameters:
        p.grad = torch.randn_like(p)
    count = sum(p.numel() for p in parameters)
    optimizer = torch.optim.AdamW(parameters, lr=1e-5, fused=True)
    loss = torch.tensor(2.0, device="cuda")
    folder = tempfile.mkdtemp()
    guard = nanproof.Guard(model, optimizer, run_dir=folder)
    bare = nanproof.Guard(model, optimizer, max_norm=None)
    kernel = AdamWKernel(parameters, lr=1e-5)

    def plain() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    def isnan_loop() -> None:
        if not any(bool(torch.isnan(p.grad).any()) for p in parameters if p.grad is not None):
            plain()

    def own_kernel() -> None:
        norms = torch.stack(torch._foreach_norm([p.grad for p in parameters], 2, dtype=torch.float32))
        total = torch.linalg.vector_norm(norms)
        kernel.step(((total + 1e-6) / 1.0).clamp(min=1), (~torch.isfinite(total)).float())

    steps = {
        "plain clip + step": plain,
        "nanproof guard.step": lambda: guard.step(loss),
        "plain step, no clipping": optimizer.step,
        "nanproof guard.step, max_norm=None": lambda: bare.step(loss),
        "isnan loop": isnan_loop,
        "norms + own Triton AdamW": own_kernel,
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        milliseconds(step, 3)
    for _ in range(rounds):
        for name, step in steps.items():
            times[name].append(milliseconds(step, 5))
    guard.close()
    bare.close()
    assert not guard.incidents and not bare.incidents
    bandwidth = copy_bandwidth()
    base = times["plain clip + step"]
    rows = {
        name: {
            "ms": statistics.median(values),
            "ratio": statistics.median(v / b for v, b in zip(values, base, strict=True)),
            "low": sorted(v / b for v, b in zip(values, base, strict=True))[rounds // 4],
            "high": sorted(v / b for v, b in zip(values, base, strict=True))[3 * rounds // 4],
            "rounds": rounds,
        }
        for name, values in times.items()
    }
    floors = {units: units * 4 * count / bandwidth * 1e3 for units in (8, 9, 10)}
    title = f"optimizer's part, {count / 1e9:.2f} B fp32 parameters, AdamW"
    print(table(title, rows))
    print(
        f"copy bandwidth {bandwidth / 1e12:.2f} TB/s; bandwidth floors: "
        + ", ".join(f"{u} units {ms:.2f} ms" for u, ms in floors.items())
    )
    return {"title": title, "rows": rows, "bandwidth_TBps": bandwidth / 1e12, "floor_ms_by_units": floors}


def whole_step(rounds: int) -> dict[str, Any]:
    parameters = sum(p.numel() for p in small_llama().parameters())
    batch = torch.randint(0, 32000, (8, 1024), device="cuda")
    rows = compare(small_llama, autocast_loss, batch, rounds=rounds, steps=4, names=list(VARIANTS), device="cuda")
    title = f"whole step, Llama of {parameters / 1e6:.0f} M fp32 parameters, bf16 autocast, batch 8 x 1024"
    print(table(title, rows))
    return {"title": title, "rows": rows}


def muon(rounds: int) -> dict[str, Any]:
    batch = torch.randint(0, 32000, (8, 1024), device="cuda")
    rows = compare(
        small_llama, autocast_loss, batch, rounds=2 * rounds, steps=6, names=list(MUON), device="cuda", variants=dict(MUON)
    )
    title = "whole step with Muon + AdamW, Llama of 271 M fp32 parameters, bf16 autocast, batch 8 x 1024"
    print(table(title, rows))
    model = small_llama()
    with nanproof.Guard(model, muon_and_adamw(model)) as guard:
        path = guard.path
    print(f"path: {path}")
    return {"title": title, "rows": rows, "path": path}


def no_syncs(steps: int = 200) -> dict[str, Any]:
    """Raises at the first operation that makes the host wait for the device."""
    batch = torch.randint(0, 32000, (8, 1024), device="cuda")
    found = {}
    for name in ("guard.step", "guard.train_step"):
        model = small_llama()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        with (
            tempfile.TemporaryDirectory() as folder,
            nanproof.Guard(model, optimizer, loss_fn=autocast_loss, scheduler=scheduler, run_dir=folder) as guard,
        ):

            def one(
                guard: nanproof.Guard = guard, name: str = name, model: nn.Module = model, optimizer: Any = optimizer
            ) -> None:
                if name == "guard.train_step":
                    guard.train_step(batch)
                else:
                    optimizer.zero_grad()
                    loss = autocast_loss(model, batch)
                    guard.backward(loss)
                    guard.step(loss)

            for _ in range(3):
                one()
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            try:
                for _ in range(steps):
                    one()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            waits = guard.parts.stepper.courier.waits
        assert len(guard.history) == steps + 3 and not guard.incidents
        found[name] = {"steps": steps, "syncs": 0, "waits_for_a_record_two_steps_old": waits}
        print(f"{name}: {steps} steps under set_sync_debug_mode('error'): 0 host syncs; waited for a record {waits} times")
    return found


def failure(rounds: int = 5) -> dict[str, Any]:
    """Milliseconds that one bad batch adds, with two held batches trained on again."""
    model = small_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    spoil = torch.zeros((), device="cuda")

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return autocast_loss(model, batch[0]) + batch[1]

    good = (torch.randint(0, 32000, (8, 1024), device="cuda"), spoil)
    bad = (good[0], spoil + float("nan"))
    guard = nanproof.Guard(model, optimizer, loss_fn=loss_fn)

    def run(batches: list[Any]) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for batch in batches:
            guard.train_step(batch)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - start)

    run([good] * 5)
    added, plain = [], []
    for _ in range(rounds):
        healthy = run([good] * 10)
        plain.append(healthy / 10)
        added.append(run([good] * 4 + [bad] + [good] * 6) - healthy)
    guard.close()
    assert len(guard.incidents) == rounds
    result = {"ms_a_step": statistics.median(plain), "ms_added_by_a_bad_batch": statistics.median(added)}
    steps = result["ms_added_by_a_bad_batch"] / result["ms_a_step"]
    print(f"a bad batch adds {result['ms_added_by_a_bad_batch']:.1f} ms, the time of {steps:.1f} steps")
    return result


def memory() -> dict[str, float]:
    """Peak memory of ten steps, guarded and not, in MiB."""
    batch = torch.randint(0, 32000, (8, 1024), device="cuda")
    peaks = {}
    for name in ("plain clip + step", "nanproof guard.train_step"):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with VARIANTS[name](small_llama(), autocast_loss) as step:
            for _ in range(10):
                step(batch)
        torch.cuda.synchronize()
        peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
        del step
    print("peak memory: " + ", ".join(f"{name} {mib:.0f} MiB" for name, mib in peaks.items()))
    return peaks


PARTS = {
    "optimizer part": optimizer_part,
    "whole step": whole_step,
    "muon": muon,
    "no host sync": no_syncs,
    "failure": failure,
    "memory": memory,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--only", nargs="*", choices=list(PARTS), default=list(PARTS))
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = True
    results: dict[str, Any] = {}
    for name in args.only:
        results[name] = PARTS[name](args.rounds) if name in ("optimizer part", "whole step", "muon") else PARTS[name]()
        torch.cuda.empty_cache()
        print(flush=True)
        (args.out / "partial.json").write_text(json.dumps(results))
    (args.out / "partial.json").unlink(missing_ok=True)
    print(f"written to {save('gpu', torch.cuda.get_device_name(), results, args.out)}")


if __name__ == "__main__":
    main()
