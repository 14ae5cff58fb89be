"""What the guard costs on a CUDA device, wall time and host time, beside other tools: prints tables and writes JSON.

python -m benchmarks.gpu --only GROUP     # `steps`, then `compiled`: some minutes each on an H200

Each ratio is to clip_grad_norm_ + a fused step in the same run. Host time is the time until a step's call returns, with the
device idle before it. Results of parts that are not measured again stay in the file.

- `steps`: the optimizer's part alone, 1.1 B fp32 parameters, and what the bandwidth allows; whole steps of a 271 M and a 5 M
  Llama and of ResNet-50, bf16 autocast, all telemetry on; FSDP2 on one rank; Muon + AdamW; no host sync in 200 guarded steps;
  what a bad step costs; memory.
- `compiled`: both Llamas under torch.compile, and with mode="reduce-overhead".
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import nanproof
from benchmarks.variants import (
    CAPTURED,
    MUON,
    OTHERS,
    VARIANTS,
    alternate,
    compare,
    guard_facts,
    muon_and_adamw,
    other_parts,
    sgd,
    synchronize,
    table,
    timed,
)
from tools.results import RESULTS, add, cpu_name
from zoo.llama import Llama, next_token_loss
from zoo.resnet import ResNet50

NANPROOF = ["nanproof guard.step", "nanproof guard.train_step"]
WHOLE = ["plain clip + step", *NANPROOF, *CAPTURED, *OTHERS]
BESIDE = ["plain clip + step", *NANPROOF, *CAPTURED, "isnan loop", "stabilityguard", "arc-training", "detect_anomaly"]
GUARDED = {*NANPROOF, *CAPTURED}
ALL = {**VARIANTS, **CAPTURED}


@dataclass(frozen=True)
class Setting:
    """Where and how thoroughly to measure."""

    device: str
    rounds: int
    tiny: bool
    """Models of a few thousand parameters: shows that everything runs, measures nothing."""


@dataclass(frozen=True)
class Workload:
    """A model, its loss and a batch."""

    name: str
    build: Callable[[], nn.Module]
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batch: Any

    @property
    def title(self) -> str:
        count = sum(p.numel() for p in self.build().parameters())
        first = self.batch[0] if isinstance(self.batch, tuple) else self.batch
        shape = " x ".join(map(str, first.shape))
        return f"{self.name} of {count / 1e6:.{0 if count >= 1e7 else 1}f} M fp32 parameters, bf16 autocast, batch {shape}"


def autocast_loss(model: nn.Module, batch: Tensor) -> Tensor:
    with torch.autocast(batch.device.type, dtype=torch.bfloat16):
        return next_token_loss(model, batch)


def classification_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    with torch.autocast(images.device.type, dtype=torch.bfloat16):
        return F.cross_entropy(model(images).float(), labels)


SHAPES = {
    "271 M": {"hidden": 1024, "layers": 16, "heads": 16, "intermediate": 2816, "vocab": 32000, "length": 1024},
    "5 M": {"hidden": 256, "layers": 6, "heads": 4, "intermediate": 688, "vocab": 1000, "length": 256},
    "tiny": {"hidden": 16, "layers": 2, "heads": 2, "intermediate": 32, "vocab": 32, "length": 8},
}


def llama(size: str, at: Setting) -> Workload:
    shape = SHAPES["tiny" if at.tiny else size]

    def build() -> nn.Module:
        torch.manual_seed(0)
        return Llama(**shape, kv_heads=shape["heads"]).to(at.device)

    batch = torch.randint(0, shape["vocab"], (2 if at.tiny else 8, shape["length"]), device=at.device)
    return Workload("Llama", build, autocast_loss, batch)


def resnet(at: Setting) -> Workload:
    width, count, size = (2, 2, 32) if at.tiny else (64, 64, 224)

    def build() -> nn.Module:
        torch.manual_seed(0)
        return ResNet50(width, classes=10 if at.tiny else 1000).to(at.device, memory_format=torch.channels_last)

    images = torch.randn(count, 3, size, size, device=at.device).to(memory_format=torch.channels_last)
    return Workload(
        "ResNet-50", build, classification_loss, (images, torch.randint(0, 10 if at.tiny else 1000, (count,), device=at.device))
    )


def compiled(workload: Workload, mode: str | None) -> Workload:
    """The same with torch.compile. Each model has a forward of its own: torch keeps what it compiled by code object, and looks
    through all that it compiled for one, which would make the later variants slower."""

    def build() -> nn.Module:
        model = workload.build()
        code = type(model).forward
        forward = types.FunctionType(code.__code__.replace(), code.__globals__, code.__name__, code.__defaults__)
        model.__class__ = type(type(model).__name__, (type(model),), {"forward": forward})
        model.compile(mode=mode)
        return model

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        return workload.loss_fn(model, batch)

    loss = loss_fn if mode == "reduce-overhead" else workload.loss_fn
    return Workload(f"{workload.name}, torch.compile({'' if mode is None else f'mode={mode!r}'}),", build, loss, workload.batch)


def measured(workload: Workload, at: Setting, names: list[str], variants: dict[str, Any], **options: Any) -> dict[str, Any]:
    options = {"steps": 1 if at.tiny else 4, **options}
    rows = compare(
        workload.build,
        workload.loss_fn,
        workload.batch,
        rounds=at.rounds,
        names=names,
        device=at.device,
        variants=variants,
        **options,
    )
    title = f"whole step, {workload.title}"
    print(table(title, rows), flush=True)
    return {"title": title, "rows": rows}


def whole_step(size: str, at: Setting) -> dict[str, Any]:
    """All variants. Small models take more steps a round, as theirs are short."""
    return measured(llama(size, at), at, WHOLE, ALL, **({"steps": 10} if size == "5 M" and not at.tiny else {}))


def compiled_step(size: str, mode: str | None, at: Setting) -> dict[str, Any]:
    """The first steps compile, and record the CUDA graphs; the same once more for the addresses of gradients to repeat."""
    torch._dynamo.reset()
    steps = 1 if at.tiny else 10 if size == "5 M" else 4
    try:
        return measured(compiled(llama(size, at), mode), at, BESIDE, ALL, steps=steps, warm_up=3 if at.tiny else 12)
    finally:
        torch._dynamo.reset()


def resnet50(at: Setting) -> dict[str, Any]:
    """SGD with momentum, channels last."""
    return measured(resnet(at), at, BESIDE, {name: partial(ALL[name], make=sgd) for name in BESIDE})


def fsdp2(at: Setting) -> dict[str, Any]:
    """The 271 M Llama under fully_shard, each block and the whole, on one rank: what DTensors and collectives add."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    base = llama("271 M", at)
    store = dist.HashStore()
    dist.init_process_group("nccl" if at.device == "cuda" else "gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh(at.device, (1,))

        def build() -> nn.Module:
            model = base.build()
            for block in model.layers:
                fully_shard(block, mesh=mesh)
            return fully_shard(model, mesh=mesh)

        return measured(Workload("FSDP2 on one rank, Llama", build, base.loss_fn, base.batch), at, BESIDE, ALL)
    finally:
        dist.destroy_process_group()


def muon(at: Setting) -> dict[str, Any]:
    """Muon for the matrices, AdamW for the rest. Twice the rounds, as Muon's own time varies."""
    workload = llama("271 M", at)
    found = measured(workload, replace(at, rounds=2 * at.rounds), list(MUON), dict(MUON), **({} if at.tiny else {"steps": 6}))
    model = workload.build()
    with nanproof.Guard(model, muon_and_adamw(model)) as guard:
        found["path"] = guard.path
    print(f"path: {guard.path}")
    return {**found, "title": found["title"].replace("whole step", "whole step with Muon + AdamW")}


def copy_bandwidth(at: Setting) -> float:
    """Bytes a second, read and written, of a large device-to-device copy."""
    a = torch.randn(1 << (12 if at.tiny else 30), device=at.device)
    b = torch.empty_like(a)
    b.copy_(a)
    return 2 * a.nbytes / timed(lambda: b.copy_(a), 10, at.device)[0]


def optimizer_part(at: Setting) -> dict[str, Any]:
    """All variants on the same parameters and gradients. detect_anomaly is not among them: it looks at backward passes."""
    shape = {"hidden": 2048, "layers": 22, "heads": 32, "kv_heads": 4, "intermediate": 5632, "vocab": 32000, "length": 2048}
    with torch.device(at.device):
        model = Llama(**({**SHAPES["tiny"], "kv_heads": 2} if at.tiny else shape))
    parameters = list(model.parameters())
    for p in parameters:
        p.grad = torch.randn_like(p)
    count = sum(p.numel() for p in parameters)
    loss = torch.tensor(2.0, device=at.device)

    def adamw() -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-5, fused=True)

    optimizer = adamw()

    def plain() -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    def isnan_loop() -> None:
        if not any(bool(torch.isnan(p.grad).any()) for p in parameters if p.grad is not None):
            plain()

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        guard = stack.enter_context(nanproof.Guard(model, optimizer, run_dir=folder))
        bare = stack.enter_context(nanproof.Guard(model, optimizer, max_norm=None))
        # An optimizer of its own: capture turns learning rates into tensors.
        capturing = stack.enter_context(nanproof.Guard(model, adamw(), policy=nanproof.Policy(capture=True)))
        calls: dict[str, Callable[[], Any]] = {
            "plain clip + step": plain,
            "nanproof guard.step": lambda: guard.step(loss),
            "nanproof guard.step, capture": lambda: capturing.step(loss),
            "plain step, no clipping": optimizer.step,
            "nanproof guard.step, max_norm=None": lambda: bare.step(loss),
            "isnan loop": isnan_loop,
            **({"norms + own Triton AdamW": own_kernel(parameters)} if at.device == "cuda" else {}),
            **other_parts(lambda: (model, adamw()), loss, stack),
        }
        for call in calls.values():
            timed(call, 3, at.device)
        rows = alternate(calls, rounds=at.rounds, repeat=1 if at.tiny else 5, device=at.device)
        rows["nanproof guard.step, capture"] |= guard_facts(capturing)
    assert not any(g.incidents for g in (guard, bare, capturing))
    bandwidth = copy_bandwidth(at)
    floors = {units: units * 4 * count / bandwidth * 1e3 for units in (8, 9, 10)}
    title = f"optimizer's part, {count / 1e9:.2f} B fp32 parameters, AdamW"
    print(table(title, rows))
    print(
        f"copy bandwidth {bandwidth / 1e12:.2f} TB/s; bandwidth floors: "
        + ", ".join(f"{u} units {ms:.2f} ms" for u, ms in floors.items())
    )
    return {"title": title, "rows": rows, "bandwidth_TBps": bandwidth / 1e12, "floor_ms_by_units": floors}


def own_kernel(parameters: list[nn.Parameter]) -> Callable[[], Any]:
    from benchmarks.adamw_kernel import AdamWKernel  # needs Triton

    kernel = AdamWKernel(parameters, lr=1e-5)

    def call() -> None:
        norms = torch.stack(torch._foreach_norm([p.grad for p in parameters], 2, dtype=torch.float32))
        total = torch.linalg.vector_norm(norms)
        kernel.step(((total + 1e-6) / 1.0).clamp(min=1), (~torch.isfinite(total)).float())

    return call


def no_syncs(at: Setting) -> dict[str, Any]:
    """Raises at the first operation that makes the host wait for the device."""
    workload, steps = llama("271 M", at), 5 if at.tiny else 200
    found = {}
    for name in ("guard.step", "guard.train_step"):
        model = workload.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        with (
            tempfile.TemporaryDirectory() as folder,
            nanproof.Guard(model, optimizer, loss_fn=workload.loss_fn, scheduler=scheduler, run_dir=folder) as guard,
        ):

            def one(
                guard: nanproof.Guard = guard, name: str = name, model: nn.Module = model, optimizer: Any = optimizer
            ) -> None:
                if name == "guard.train_step":
                    guard.train_step(workload.batch)
                else:
                    optimizer.zero_grad()
                    loss = workload.loss_fn(model, workload.batch)
                    guard.backward(loss)
                    guard.step(loss)

            for _ in range(3):
                one()
            synchronize(at.device)
            sync_debug_mode(at, "error")
            try:
                for _ in range(steps):
                    one()
            finally:
                sync_debug_mode(at, "default")
            waits = guard.parts.stepper.courier.waits
        assert len(guard.history) == steps + 3 and not guard.incidents
        found[name] = {"steps": steps, "syncs": 0, "waits_for_a_record_two_steps_old": waits}
        print(f"{name}: {steps} steps under set_sync_debug_mode('error'): 0 host syncs; waited for a record {waits} times")
    return found


def sync_debug_mode(at: Setting, mode: str) -> None:
    if at.device == "cuda":
        torch.cuda.set_sync_debug_mode(mode)


def failure(at: Setting) -> dict[str, Any]:
    """Milliseconds that one bad batch adds, with two held batches trained on again."""
    workload, rounds = llama("271 M", at), 2 if at.tiny else 5
    model = workload.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    spoil = torch.zeros((), device=at.device)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return workload.loss_fn(model, batch[0]) + batch[1]

    good = (workload.batch, spoil)
    bad = (good[0], spoil + float("nan"))
    guard = nanproof.Guard(model, optimizer, loss_fn=loss_fn)

    def run(batches: list[Any]) -> float:
        synchronize(at.device)
        start = time.perf_counter()
        for batch in batches:
            guard.train_step(batch)
        synchronize(at.device)
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


def memory(at: Setting) -> dict[str, float]:
    """Peak memory of ten steps, guarded and not, in MiB; nothing on a CPU."""
    if at.device == "cpu":
        return {}
    workload = llama("271 M", at)
    peaks = {}
    for name in ("plain clip + step", "nanproof guard.train_step"):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with VARIANTS[name](workload.build(), workload.loss_fn) as step:
            for _ in range(10):
                step(workload.batch)
        torch.cuda.synchronize()
        peaks[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
        del step
    print("peak memory: " + ", ".join(f"{name} {mib:.0f} MiB" for name, mib in peaks.items()))
    return peaks


PARTS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "optimizer part": optimizer_part,
    "whole step": partial(whole_step, "271 M"),
    "5 M": partial(whole_step, "5 M"),
    "resnet50": resnet50,
    "fsdp2": fsdp2,
    "muon": muon,
    "no host sync": no_syncs,
    "failure": failure,
    "memory": memory,
    "5 M compiled": partial(compiled_step, "5 M", None),
    "5 M graphs": partial(compiled_step, "5 M", "reduce-overhead"),
    "whole step compiled": partial(compiled_step, "271 M", None),
    "whole step graphs": partial(compiled_step, "271 M", "reduce-overhead"),
}
GROUPS = {
    "steps": [name for name in PARTS if "compiled" not in name and "graphs" not in name],
    "compiled": [name for name in PARTS if "compiled" in name or "graphs" in name],
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--only", nargs="*", choices=[*GROUPS, *PARTS], default=list(GROUPS), help="parts, or groups of them")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    cuda = torch.cuda.is_available()
    if not cuda and not options.tiny:
        parser.error("no CUDA device here; benchmarks.cpu and benchmarks.host measure on a CPU")
    torch.backends.cuda.matmul.allow_tf32 = True
    at = Setting("cuda" if cuda else "cpu", options.rounds, options.tiny)
    device = torch.cuda.get_device_name() if cuda else cpu_name()
    broken = []
    for name in [part for given in options.only for part in GROUPS.get(given, [given])]:
        start = time.perf_counter()
        try:
            found = PARTS[name](at)
            path = add("gpu_tiny" if options.tiny else "gpu", device, {name: found}, options.out)
            broken += [f"{name}, {row}" for row, facts in found.get("rows", {}).items() if row in GUARDED and "failed" in facts]
            print(f"{name}: {time.perf_counter() - start:.0f} s; written to {path}\n", flush=True)
        except Exception:  # the other parts are worth having
            traceback.print_exc()
            broken.append(name)
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    if broken:
        raise SystemExit(f"not measured: {', '.join(broken)}")


if __name__ == "__main__":
    main()
