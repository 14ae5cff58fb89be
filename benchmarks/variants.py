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
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import nanproof

Step = Callable[[Any], None]
LossFn = Callable[[nn.Module, Any], Tensor]
Make = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, fused=True)


@contextmanager
def plain(model: nn.Module, loss_fn: LossFn, make: Make = adamw) -> Iterator[Step]:
    """What people write today, at its best: clip_grad_norm_ and a fused step."""
    optimizer = make(model)

    def step(batch: Any) -> None:
        optimizer.zero_grad()
        loss_fn(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    yield step


def guard_facts(guard: nanproof.Guard) -> dict[str, Any]:
    """The path a guard took, and how many of its steps were replays of a CUDA graph."""
    captures = guard.parts.stepper.captures
    return {"path": guard.path, **({} if captures is None else {"replays": captures.replays})}


@contextmanager
def guard_step(model: nn.Module, loss_fn: LossFn, make: Make = adamw, policy: nanproof.Policy | None = None) -> Iterator[Step]:
    """guard.step in your own loop, all telemetry on."""
    optimizer = make(model)
    with tempfile.TemporaryDirectory() as folder, nanproof.Guard(model, optimizer, run_dir=folder, policy=policy) as guard:

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            guard.step(loss)

        step.facts = partial(guard_facts, guard)  # type: ignore[attr-defined]
        yield step
    assert not guard.incidents, guard.incidents


@contextmanager
def guard_train_step(
    model: nn.Module, loss_fn: LossFn, make: Make = adamw, policy: nanproof.Policy | None = None
) -> Iterator[Step]:
    """guard.train_step, all telemetry on: nothing but the bad batch is lost."""
    optimizer = make(model)
    with (
        tempfile.TemporaryDirectory() as folder,
        nanproof.Guard(model, optimizer, loss_fn=loss_fn, run_dir=folder, policy=policy) as guard,
    ):

        def step(batch: Any) -> None:
            guard.train_step(batch)

        step.facts = partial(guard_facts, guard)  # type: ignore[attr-defined]
        yield step
    assert not guard.incidents, guard.incidents


@contextmanager
def isnan_loop(model: nn.Module, loss_fn: LossFn, make: Make = adamw) -> Iterator[Step]:
    """The loop over `isnan(p.grad).any()` that is in countless scripts; it does not see Inf."""
    optimizer = make(model)

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
def guarded_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """stabilityguard's wrapper around an optimizer, with its defaults."""
    from stabilityguard import GuardedOptimizer

    with tempfile.TemporaryDirectory() as folder:
        yield GuardedOptimizer(optimizer, model, log_dir=folder, verbose=False)


@contextmanager
def stabilityguard(model: nn.Module, loss_fn: LossFn, make: Make = adamw) -> Iterator[Step]:
    """The nearest tool on the package index, with its defaults, around the same fused optimizer."""
    with guarded_optimizer(model, make(model)) as optimizer:

        def step(batch: Any) -> None:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        yield step


@contextmanager
def arc_controller(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Any]:
    """arc-training's controller with its defaults, but two: it calibrates for 5 steps, not 50, so that what it does afterwards is
    timed; and it copies its snapshots at once, not in a thread that would run in the time of the other variants. A snapshot comes
    every 20 steps, so a median over short rounds does not contain it."""
    from arc import Controller, ControllerConfig

    config = ControllerConfig(calibration_steps=5, async_checkpoint=False, verbose=False)
    controller = Controller(model, optimizer, config=config)
    try:
        yield controller
    finally:
        controller.close()


@contextmanager
def arc_training(model: nn.Module, loss_fn: LossFn, make: Make = adamw) -> Iterator[Step]:
    """arc-training, the other recovery tool on the package index, as its README uses it; it does not clip."""
    optimizer = make(model)
    skipped = 0
    with arc_controller(model, optimizer) as controller:

        def step(batch: Any) -> None:
            nonlocal skipped
            optimizer.zero_grad()
            loss = loss_fn(model, batch)
            loss.backward()
            if controller.step(loss).should_skip:
                skipped += 1
                return
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()

        step.facts = lambda: {"skipped healthy steps": skipped}  # type: ignore[attr-defined]
        yield step


@contextmanager
def underflow_overflow(model: nn.Module, loss_fn: LossFn) -> Iterator[Step]:
    """transformers' DebugUnderflowOverflow hooks on every module."""
    from transformers.debug_utils import DebugUnderflowOverflow

    with plain(model, loss_fn) as step:
        DebugUnderflowOverflow(model)

        def quiet(batch: Any) -> None:
            with redirect_stdout(None):
                step(batch)

        yield quiet


@contextmanager
def detect_anomaly(model: nn.Module, loss_fn: LossFn, make: Make = adamw) -> Iterator[Step]:
    """torch.autograd.detect_anomaly around the plain step."""
    with plain(model, loss_fn, make) as step:

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
    "arc-training": arc_training,
    "DebugUnderflowOverflow": underflow_overflow,
    "detect_anomaly": detect_anomaly,
}
CAPTURE = nanproof.Policy(capture=True)
CAPTURED = {
    "nanproof guard.step, capture": partial(guard_step, policy=CAPTURE),
    "nanproof guard.train_step, capture": partial(guard_train_step, policy=CAPTURE),
}
"""The optimizer's part as one CUDA graph, where the addresses of gradients repeat."""
OTHERS = ("isnan loop", "mean-and-std skip", "stabilityguard", "arc-training", "DebugUnderflowOverflow", "detect_anomaly")


@contextmanager
def stabilityguard_part(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> Iterator[Callable[[], None]]:
    """stabilityguard in the optimizer's part of a step. What it does in hooks on backward is not in it."""
    parameters = list(model.parameters())
    with guarded_optimizer(model, optimizer) as wrapped:

        def call() -> None:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            wrapped.step()

        yield call


@contextmanager
def arc_part(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> Iterator[Callable[[], None]]:
    """arc-training in the optimizer's part of a step."""
    parameters = list(model.parameters())
    skipped = 0
    with arc_controller(model, optimizer) as controller:

        def call() -> None:
            nonlocal skipped
            if controller.step(loss).should_skip:
                skipped += 1
                return
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()

        call.facts = lambda: {"skipped healthy steps": skipped}  # type: ignore[attr-defined]
        yield call


def other_parts(
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], loss: Tensor, stack: ExitStack
) -> dict[str, Callable[[], None]]:
    """What other tools put in place of the optimizer's part, each over what `make` returns."""
    found = {}
    for name, part in {"stabilityguard": stabilityguard_part, "arc-training": arc_part}.items():
        try:
            found[name] = stack.enter_context(part(*make(), loss))
        except ModuleNotFoundError as error:
            print(f"{name} is not measured: {error}")
    return found


SLOW = (*OTHERS, "naive hooks")
"""Timed in fewer rounds: their ratios are far from 1."""


def timed(call: Callable[[], Any], repeat: int, device: str) -> tuple[float, float]:
    """Seconds a call, and seconds until the first of them returned; the device is idle before and after."""
    synchronize(device)
    start = time.perf_counter()
    call()
    returned = time.perf_counter()
    for _ in range(repeat - 1):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / repeat, returned - start


def alternate(calls: dict[str, Callable[[], Any]], *, rounds: int, repeat: int, device: str) -> dict[str, dict[str, Any]]:
    """Time the calls in alternating rounds, each in a new random order, against the first of them."""
    order = random.Random(0)
    names = list(calls)
    wall: dict[str, list[float]] = {name: [] for name in names}
    host: dict[str, list[float]] = {name: [] for name in names}
    ratios: dict[str, list[float]] = {name: [] for name in names}
    host_ratios: dict[str, list[float]] = {name: [] for name in names}
    for round_ in range(rounds):
        now = [name for name in names if name not in SLOW or round_ < max(5, rounds // 4)]
        order.shuffle(now)
        took = {name: timed(calls[name], repeat, device) for name in now}
        for name, (seconds, until_return) in took.items():
            wall[name].append(seconds)
            host[name].append(until_return)
            ratios[name].append(seconds / took[names[0]][0])
            host_ratios[name].append(until_return / took[names[0]][1])
    rows: dict[str, dict[str, Any]] = {}
    for name in names:
        count = len(ratios[name])
        rows[name] = {
            "ms": 1e3 * statistics.median(wall[name]),
            "ratio": statistics.median(ratios[name]),
            "low": sorted(ratios[name])[count // 4],
            "high": sorted(ratios[name])[3 * count // 4],
            "rounds": count,
        }
        if device != "cpu":  # on a CPU the host does the work itself
            rows[name] |= {"host_ms": 1e3 * statistics.median(host[name]), "host_ratio": statistics.median(host_ratios[name])}
        rows[name] |= facts_of(calls[name])
    return rows


def facts_of(call: Callable[..., Any]) -> dict[str, Any]:
    """What a variant says about its steps: the path it took, steps it skipped."""
    found: dict[str, Any] = getattr(getattr(call, "func", call), "facts", dict)()
    return found


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
    warm_up: int | None = None,
) -> dict[str, dict[str, Any]]:
    """Seconds a step, of the host and in all, and the median of the ratios to the first variant. A variant whose package is not
    installed is left out, with a printed reason; the row of one that fails in its first steps says so."""
    opened: dict[str, Step] = {}
    failed: dict[str, dict[str, Any]] = {}
    with ExitStack() as stack:
        for name in names:
            with ExitStack() as own:
                try:
                    step = own.enter_context((variants or VARIANTS)[name](build(), loss_fn))
                    timed(partial(step, batch), warm_up or steps, device)
                except ModuleNotFoundError as error:
                    print(f"{name} is not measured: {error}")
                except Exception as error:
                    if name == names[0]:
                        raise
                    failed[name] = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
                    with suppress(Exception):
                        own.pop_all().__exit__(type(error), error, None)
                else:
                    opened[name] = step
                    stack.enter_context(own.pop_all())
        calls = {name: partial(step, batch) for name, step in opened.items()}
        rows = alternate(calls, rounds=rounds, repeat=steps, device=device)
    return rows | failed


def synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def table(title: str, rows: dict[str, dict[str, Any]]) -> str:
    host = any("host_ms" in row for row in rows.values())
    lines = [title, f"{'':34s} {'ms a step':>10s} {'ratio':>7s}{'   host ms   ratio' if host else ''}   middle half of rounds"]
    for name, row in rows.items():
        if "failed" in row:
            lines.append(f"{name:34s} {row['failed'][:90]}")
            continue
        of_host = f" {row['host_ms']:9.3f} {row['host_ratio']:7.3f}" if "host_ms" in row else ""
        spread = f"{row['low']:.3f}-{row['high']:.3f} ({row['rounds']})"
        lines.append(f"{name:34s} {row['ms']:10.3f} {row['ratio']:7.3f}{of_host}   {spread}")
    for name, row in rows.items():
        if "path" in row:
            replays = f"; {row['replays']} replays" if "replays" in row else ""
            lines.append(f"  {name}: {row['path']}{replays}")
        if row.get("skipped healthy steps"):
            lines.append(f"  {name}: skipped {row['skipped healthy steps']} healthy steps, so its time is too low")
    return "\n".join(lines)
