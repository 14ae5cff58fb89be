"""The same training step under different guards, and an honest way to time them against each other.

Every variant has a model of its own, from the same seed. Rounds alternate: in each round every variant takes a few steps, in a
new random order, and the figure is the median over rounds of its time over that round's plain time. So a machine that slows
down for a while slows down all of them alike.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout, suppress
from typing import Any

import torch
from torch import Tensor, nn

import nanproof

Step = Callable[[Any], None]
LossFn = Callable[[nn.Module, Any], Tensor]


@contextmanager
def plain(model: nn.Module, loss_fn: LossFn) -> Iterator[Step]:
    """What people write today, at its best: clip_grad_norm_ and a fused step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    yield step


@contextmanager
def guard_step(model: nn.Module, loss_fn: LossFn) -> Iterator[Step]:
    """guard.step in a loop of one's own, all telemetry on."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with tempfile.TemporaryDirectory() as folder, nanproof.Guard(model, optimizer, run_dir=folder) as guard:

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            guard.step(loss)

        yield step
    assert not guard.incidents, guard.incidents


@contextmanager
def guard_train_step(model: nn.Module, loss_fn: LossFn) -> Iterator[Step]:
    """guard.train_step, all telemetry on: nothing but the bad batch is lost."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with tempfile.TemporaryDirectory() as folder, nanproof.Guard(model, optimizer, loss_fn=loss_fn, run_dir=folder) as guard:

        def step(batch: Any) -> None:
            guard.train_step(batch)

        yield step
    assert not guard.incidents, guard.incidents


@contextmanager
def isnan_loop(model: nn.Module, loss_fn: LossFn) -> Iterator[Step]:
    """The loop over `isnan(p.grad).any()` that is in countless scripts; it does not see Inf."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        bad = False
        for p in model.parameters():
            if p.grad is not None and torch.isnan(p.grad).any():
                bad = True
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not bad:
            optimizer.step()

    yield step


@contextmanager
def mean_std_skip(model: nn.Module, loss_fn: LossFn) -> Iterator[Step]:
    """A rolling mean and standard deviation of loss and norm decide, on the device, a factor of 0 or 1 that the update is
    multiplied with: the manner of OLMo-core's SkipStepAdamW, here with foreach instead of its loop over parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    m, v = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
    count = torch.zeros((), device=parameters[0].device)
    losses: list[Tensor] = []
    norms: list[Tensor] = []
    lr, b1, b2, eps, decay, sigma, window = 1e-4, 0.9, 0.999, 1e-8, 0.01, 6, 128

    def usual(values: list[Tensor]) -> Tensor:
        past = torch.stack(values[:-1])
        std, mean = torch.std_mean(past)
        return values[-1] - mean <= sigma * std

    @torch.no_grad()
    def update(loss: Tensor, norm: Tensor) -> None:
        losses.append(loss.detach())
        norms.append(norm.detach())
        del losses[: -window - 1], norms[: -window - 1]
        factor = torch.ones_like(count)
        if len(losses) > window // 2:
            factor = torch.logical_and(usual(losses), usual(norms)).to(factor.dtype)
        gradients = [p.grad for p in parameters]
        count.add_(factor)
        torch._foreach_mul_(parameters, 1 - lr * decay * factor)
        torch._foreach_lerp_(m, gradients, (1 - b1) * factor)
        torch._foreach_mul_(v, 1 - (1 - b2) * factor)
        torch._foreach_add_(v, torch._foreach_mul(torch._foreach_mul(gradients, gradients), (1 - b2) * factor))
        root = torch._foreach_sqrt(torch._foreach_div(v, 1 - b2**count))
        torch._foreach_add_(root, eps)
        step = torch._foreach_div(torch._foreach_div(m, 1 - b1**count), root)
        torch._foreach_mul_(step, -lr * factor)
        torch._foreach_add_(parameters, step)

    def step(batch: Any) -> None:
        model.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        update(loss, torch.nn.utils.clip_grad_norm_(parameters, 1.0))

    yield step


@contextmanager
def stabilityguard(model: nn.Module, loss_fn: LossFn) -> Iterator[Step]:
    """The nearest tool on the package index, with its defaults, around the same fused optimizer."""
    from stabilityguard import GuardedOptimizer

    base = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with tempfile.TemporaryDirectory() as folder:
        optimizer = GuardedOptimizer(base, model, log_dir=folder, verbose=False)

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        yield step


@contextmanager
def underflow_overflow(model: nn.Module, loss_fn: LossFn) -> Iterator[Step]:
    """transformers' DebugUnderflowOverflow hooks on every module."""
    from transformers.debug_utils import DebugUnderflowOverflow

    with plain(model, loss_fn) as step:
        DebugUnderflowOverflow(model)
        yield step


@contextmanager
def detect_anomaly(model: nn.Module, loss_fn: LossFn) -> Iterator[Step]:
    """torch.autograd.detect_anomaly around the plain step."""
    with plain(model, loss_fn) as step:

        def anomalous(batch: Any) -> None:
            with torch.autograd.set_detect_anomaly(True):
                step(batch)

        yield anomalous


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside, AdamW for embeddings, head and norms."""
    inside = {id(p) for name, p in model.named_parameters() if p.dim() == 2 and "embed" not in name and "head" not in name}
    muon = torch.optim.Muon([p for p in model.parameters() if id(p) in inside], lr=1e-3)
    rest = [p for p in model.parameters() if id(p) not in inside]
    return [muon, torch.optim.AdamW(rest, lr=1e-4, fused=True)]


@contextmanager
def muon_plain(model: nn.Module, loss_fn: LossFn) -> Iterator[Step]:
    """Muon + AdamW as people write it: one clip over all, then both steps."""
    optimizers = muon_and_adamw(model)

    def step(batch: Any) -> None:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_fn(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()

    yield step


@contextmanager
def muon_guarded(model: nn.Module, loss_fn: LossFn, policy: nanproof.Policy | None = None) -> Iterator[Step]:
    """The same under guard.step, all telemetry on."""
    optimizers = muon_and_adamw(model)
    with tempfile.TemporaryDirectory() as folder, nanproof.Guard(model, optimizers, run_dir=folder, policy=policy) as guard:

        def step(batch: Any) -> None:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            guard.step(loss)

        yield step
    assert not guard.incidents, guard.incidents


@contextmanager
def muon_train_step(model: nn.Module, loss_fn: LossFn) -> Iterator[Step]:
    """The same under guard.train_step."""
    optimizers = muon_and_adamw(model)
    with tempfile.TemporaryDirectory() as folder, nanproof.Guard(model, optimizers, loss_fn=loss_fn, run_dir=folder) as guard:
        yield guard.train_step
    assert not guard.incidents, guard.incidents


MUON = {
    "plain Muon + AdamW": muon_plain,
    "nanproof guard.step": muon_guarded,
    "nanproof guard.train_step": muon_train_step,
}
VARIANTS = {
    "plain clip + step": plain,
    "nanproof guard.step": guard_step,
    "nanproof guard.train_step": guard_train_step,
    "isnan loop": isnan_loop,
    "mean-and-std skip": mean_std_skip,
    "stabilityguard": stabilityguard,
    "DebugUnderflowOverflow": underflow_overflow,
    "detect_anomaly": detect_anomaly,
}
SLOW = ("isnan loop", "mean-and-std skip", "stabilityguard", "naive hooks", "DebugUnderflowOverflow", "detect_anomaly")
"""Timed in fewer rounds: their ratios are far from 1."""


def compare(
    build: Callable[[], nn.Module],
    loss_fn: LossFn,
    batch: Any,
    *,
    rounds: int,
    steps: int,
    names: list[str],
    device: str = "cpu",
    variants: dict[str, Any] | None = None,
) -> dict[str, dict[str, float]]:
    """Seconds a step, and the median of the ratio to plain, of each variant."""
    order = random.Random(0)
    opened: dict[str, tuple[Any, Step]] = {}
    for name in names:
        manager = (variants or VARIANTS)[name](build(), loss_fn)
        opened[name] = (manager, manager.__enter__())

    def time_steps(name: str) -> float:
        step = opened[name][1]
        quiet = redirect_stdout(None) if name == "DebugUnderflowOverflow" else nullcontext()
        synchronize(device)
        start = time.perf_counter()
        with quiet:
            for _ in range(steps):
                step(batch)
        synchronize(device)
        return (time.perf_counter() - start) / steps

    for name in names:
        time_steps(name)
    times: dict[str, list[float]] = {name: [] for name in names}
    ratios: dict[str, list[float]] = {name: [] for name in names}
    baseline = names[0]
    for round_ in range(rounds):
        now = [name for name in names if name not in SLOW or round_ < max(5, rounds // 4)]
        order.shuffle(now)
        took = {name: time_steps(name) for name in now}
        for name, seconds in took.items():
            times[name].append(seconds)
            ratios[name].append(seconds / took[baseline])
    for manager, _ in opened.values():
        with suppress(StopIteration):
            manager.__exit__(None, None, None)
    return {
        name: {
            "ms": 1e3 * statistics.median(times[name]),
            "ratio": statistics.median(ratios[name]),
            "low": sorted(ratios[name])[len(ratios[name]) // 4],
            "high": sorted(ratios[name])[3 * len(ratios[name]) // 4],
            "rounds": len(ratios[name]),
        }
        for name in names
    }


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def table(title: str, rows: dict[str, dict[str, float]]) -> str:
    lines = [title, f"{'':28s} {'ms a step':>10s} {'ratio':>7s}   middle half of rounds"]
    for name, row in rows.items():
        lines.append(f"{name:28s} {row['ms']:10.3f} {row['ratio']:7.3f}   {row['low']:.3f}-{row['high']:.3f} ({row['rounds']})")
    return "\n".join(lines)
