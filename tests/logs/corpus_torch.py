"""Logs of plain torch loops, in the many ways in which people print them."""

from __future__ import annotations

import csv
import json
import logging
import math
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from make_corpus import log, said
from torch import nn
from torch.nn import functional as F


def steps(
    n: int = 120,
    *,
    seed: int = 0,
    lr: float | Callable[[int], float] = 3e-3,
    size: int = 32,
    batch: Callable[[int, torch.Tensor], torch.Tensor] = lambda step, x: x,
    optimizer: Callable[..., Any] = torch.optim.AdamW,
    before: Callable[[int, nn.Module], None] = lambda step, model: None,
    samples: int = 4096,
    first: int = 0,
    evaluate: int = 0,
    clip: float = 1.0,
    task: str = "classes",
    dtype: torch.dtype = torch.float32,
    model: nn.Module | None = None,
    noise: float = 0.3,
) -> Iterator[dict[str, float]]:
    """A small network learns classes or numbers. Yields what a loop logs: step, loss, grad_norm, lr, eval_loss now and then."""
    torch.manual_seed(seed)
    x, truth = torch.randn(samples, 16), torch.randn(16, 10)
    held = torch.randn(512, 16)
    y, held_y = ((a @ truth + noise * 5 * torch.randn(len(a), 10)).argmax(1) for a in (x, held))
    if task == "numbers":
        y, held_y = (x @ truth[:, :1]) ** 2, (held @ truth[:, :1]) ** 2
    model = model or nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 10 if task == "classes" else 1))
    model.to(dtype)
    rate = lr if callable(lr) else lambda step: lr
    opt = optimizer(model.parameters(), lr=rate(0))
    criterion = F.cross_entropy if task == "classes" else F.mse_loss
    order = torch.Generator().manual_seed(seed + 1)
    for step in range(first, n):
        before(step, model)
        chosen = torch.randint(samples, (size,), generator=order)
        for group in opt.param_groups:
            group["lr"] = rate(step)
        opt.zero_grad()
        loss = criterion(model(batch(step, x[chosen].clone()).to(dtype)), y[chosen] if task == "classes" else y[chosen].to(dtype))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()
        values = {"step": step, "loss": loss.item(), "grad_norm": norm.item(), "lr": rate(step)}
        if evaluate and step % evaluate == evaluate - 1:
            model.eval()
            with torch.no_grad():
                values["eval_loss"] = criterion(model(held.to(dtype)), held_y).item()
            model.train()
        yield values


def at(bad_step: int, value: float = math.nan, rows: int = 1) -> Callable[[int, torch.Tensor], torch.Tensor]:
    """One batch with a bad number in it."""

    def spoil(step: int, x: torch.Tensor) -> torch.Tensor:
        if step == bad_step:
            x[:rows, 0] = value
        return x

    return spoil


def first_bad(rows: list[dict[str, float]], name: str = "loss") -> dict[str, Any]:
    """The truth from the run itself: where its own number was first not finite."""
    step = next(row["step"] for row in rows if not math.isfinite(row[name]))
    return {"step": (step, step)}


def jsonl(path: Any, rows: list[dict[str, float]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@log("torch_nan_batch.jsonl", "A NaN in one sample of step 37; JSON lines", "nan", step=(37, 37))
def _(path):
    jsonl(path, list(steps(90, batch=at(37))))


@log("torch_sgd_overflow.jsonl", "SGD at a learning rate of 0.1 on a regression, no clipping; JSON lines", "inf")
def _(path):
    rows = list(steps(60, lr=0.1, optimizer=torch.optim.SGD, clip=math.inf, task="numbers"))
    jsonl(path, rows)
    return first_bad(rows)


@log(
    "nanogpt_divergence.log",
    "nanoGPT's lines; the learning rate goes from 3e-3 to 1 at iteration 200",
    "divergence",
    step=(195, 230),
)
def _(path):
    with said(path):
        print("number of parameters: 0.01M\nusing fused AdamW: False")
        for row in steps(400, lr=lambda s: 3e-3 if s < 200 else 1.0, evaluate=100):
            nanogpt(row)


@log("nanogpt_nan.log.gz", "nanoGPT's lines, gzip; a NaN in the data at iteration 150", "nan", step=(150, 150))
def _(path):
    with said(path, compress=True):
        for row in steps(300, batch=at(150), evaluate=50):
            nanogpt(row)


@log("nanogpt_overfit.log", "nanoGPT's lines; 24 samples, 1500 iterations", "overfit", severity="warning", step=(0, 500))
def _(path):
    with said(path):
        for row in steps(1500, samples=24, evaluate=50, lr=2e-3, noise=1.0):
            if row["step"] % 10 == 0 or "eval_loss" in row:
                nanogpt(row)


def nanogpt(row: dict[str, float]) -> None:
    """As nanoGPT's train.py prints."""
    if "eval_loss" in row:
        print(f"step {row['step']}: train loss {row['loss']:.4f}, val loss {row['eval_loss']:.4f}")
    print(f"iter {row['step']}: loss {row['loss']:.4f}, time {12.5:.2f}ms, mfu {3.1:.2f}%")


@log(
    "torch_frozen.log",
    "Every parameter but a useless one is detached from the loss; words and numbers",
    "zero-gradient",
    step=(0, 0),
)
def _(path):
    class Cut(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.useless = nn.Linear(16, 10), nn.Parameter(torch.zeros(()))

        def forward(self, x):
            return self.body(x).detach() + 0 * self.useless

    with said(path):
        for row in steps(80, model=Cut()):
            print(
                f"Epoch 1 | Step {row['step']} | Loss: {row['loss']:.4f} | Grad Norm: {row['grad_norm']:.4f} | LR: {row['lr']:g}"
            )


@log("torch_rate_zero.csv", "A schedule that is 0 from its first step; CSV", "learning-rate-zero", step=(0, 0))
def _(path):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", "loss", "grad_norm", "lr"])
        writer.writeheader()
        writer.writerows(steps(80, lr=0.0))


@log(
    "torch_rate_ended.csv",
    "A linear schedule of 60 steps in a run of 120; CSV",
    "learning-rate-zero",
    severity="warning",
    step=(60, 60),
)
def _(path):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", "loss", "grad_norm", "lr"])
        writer.writeheader()
        writer.writerows(steps(120, lr=lambda s: 3e-3 * max(0.0, 1 - s / 60)))


@log(
    "torch_foreign_optimizer.log",
    "The optimizer holds the parameters of a copy; key=value lines",
    "plateau",
    severity="warning",
    step=(0, 0),
)
def _(path):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 10))
    with torch.no_grad():
        model[2].weight.zero_()
        model[2].bias.zero_()

    def foreign(parameters, lr):
        return torch.optim.AdamW([p.detach().clone().requires_grad_() for p in parameters], lr=lr)

    with said(path):
        for row in steps(150, model=model, optimizer=foreign, size=256):
            print(f"step={row['step']} loss={row['loss']:.6f} lr={row['lr']:g}")


@log(
    "torch_spike.jsonl",
    "One batch with features 300 times too large at step 80; JSON lines",
    "spike",
    severity="note",
    step=(80, 80),
)
def _(path):
    def outlier(step, x):
        return x * 300 if step == 80 else x

    jsonl(path, list(steps(160, batch=outlier)))


@log(
    "torch_eval_nan.jsonl",
    "An Inf batch at step 50 whose gradient is dropped, but BatchNorm has seen it: evaluation is NaN",
    "eval-nan",
    step=(59, 59),
)
def _(path):
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Linear(64, 10))

    def peek(step, module):
        if step == 50:
            with torch.no_grad():
                module(torch.full((32, 16), math.inf))  # the step that was skipped

    jsonl(path, list(steps(120, model=model, before=peek, evaluate=20)))


@log(
    "torch_own_warnings.log",
    "A loop that zeroes NaN gradients and steps on; weights NaN from step 41 by an Inf that isnan missed",
    "nan-warnings",
    step=(41, 42),
)
def _(path):
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with said(path):
        for step in range(200):
            x = torch.randn(16, 8)
            if step == 41:
                x[0, 0] = math.inf
            loss = (model(x) - x[:, :1].nan_to_num(posinf=1.0)).square().mean()
            opt.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if torch.isnan(norm):
                print(f"Warning: NaN gradient detected at step {step}")
                for p in model.parameters():
                    p.grad.zero_()
            opt.step()


@log(
    "torch_resumed_past_nan.log",
    "NaN at step 60; started again from the checkpoint of step 40 with that sample removed",
    "nan",
    severity="warning",
    step=(60, 60),
)
def _(path):
    with said(path):
        for row in steps(90, batch=at(60)):
            print(f"step {row['step']} | loss {row['loss']:.5f} | lr {row['lr']:.1e}")
        print("Resuming from checkpoint ckpt/step_40.pt")
        for row in steps(140, first=40, lr=3e-3):
            print(f"step {row['step']} | loss {row['loss']:.5f} | lr {row['lr']:.1e}")


@log("torch_powershell.log", "Redirected by PowerShell: UTF-16 with a byte-order mark; NaN data at step 25", "nan", step=(25, 25))
def _(path):
    with said(path, "utf-16"):
        for row in steps(60, batch=at(25)):
            print(f"Step {row['step']}: loss = {row['loss']:.4f}, grad_norm = {row['grad_norm']:.4f}", end="\r\n")


@log("torch_timestamps.log", "Python's logging with times and levels; NaN data at step 77", "nan", step=(77, 77))
def _(path):
    with said(path) as text:
        logger = logging.getLogger("train")
        handler = logging.StreamHandler(text)
        handler.setFormatter(logging.Formatter("%(asctime)s - %(levelname)s - %(name)s - %(message)s"))
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
        for row in steps(120, batch=at(77)):
            logger.info(
                "step %d/%d loss: %.4f grad_norm: %.3f lr: %.6f", row["step"], 120, row["loss"], row["grad_norm"], row["lr"]
            )


@log("torch_tqdm.log", "A tqdm bar with the loss behind it, carriage returns kept; NaN data at step 33", "nan", step=(32, 35))
def _(path):
    from tqdm import tqdm

    with said(path) as text:
        bar = tqdm(steps(80, batch=at(33)), total=80, file=text, mininterval=0, ncols=100)
        for row in bar:
            bar.set_postfix(loss=row["loss"], grad_norm=row["grad_norm"])


@log(
    "torch_pure_fp16.jsonl",
    "Weights in fp16 and Adam with eps 1e-8, which is 0 in fp16: NaN after the first update",
    "nan",
    step=(1, 4),
)
def _(path):
    def adam(parameters, lr):
        return torch.optim.AdamW(parameters, lr=lr, foreach=False, fused=False)

    def sparse(step, x):  # a feature that is never there has a gradient of exactly 0
        x[:, 3] = 0
        return x

    rows = list(steps(60, dtype=torch.float16, optimizer=adam, batch=sparse))
    jsonl(path, rows)
    return first_bad(rows)


@log("torch_multinomial.log", "Sampling from a model with NaN weights: the real traceback", "bad-probabilities", line=(20, 80))
def _(path):
    with said(path):
        rows = steps(30)
        for row in rows:
            print(json.dumps({k: v for k, v in row.items() if k in ("step", "loss", "lr")}))
        logits = torch.randn(2, 50)
        logits[1] = math.nan
        try:
            torch.multinomial(torch.softmax(logits, -1), 1)
        except RuntimeError:
            print(traceback.format_exc().replace(__file__, "train.py"))


@log("torch_unscale_fp16.log", "GradScaler over an fp16 model: the real traceback", "unscale-fp16", line=(1, 40))
def _(path):
    with said(path):
        model = nn.Linear(4, 1).half()
        scaler, opt = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.1)
        print("Epoch 0, step 0, loss 1.2041")
        try:
            scaler.scale(model(torch.ones(2, 4).half()).sum()).backward()
            scaler.unscale_(opt)
        except ValueError:
            print(traceback.format_exc().replace(__file__, "train.py"))


@log("torch_label_out_of_range.log", "A label beyond the classes, on the CPU: the real traceback", "crash", line=(20, 80))
def _(path):
    with said(path):
        for row in steps(20):
            print(f"step {row['step']} loss {row['loss']:.4f}")
        try:
            F.cross_entropy(torch.randn(4, 10), torch.tensor([1, 2, 3, 10]))
        except IndexError:
            print(traceback.format_exc().replace(__file__, "train.py"))


def scaled(
    n: int, spoiled: Callable[[int], bool], *, warmup: int = 0, base: float = 2e-4, total: int | None = None
) -> Iterator[dict[str, float]]:
    """fp32 weights under autocast to fp16 with a real GradScaler; the schedule advances only if the optimizer stepped."""
    torch.manual_seed(1)
    total = total or n
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 10))
    opt = torch.optim.AdamW(model.parameters(), lr=base)
    scaler = torch.amp.GradScaler("cpu", growth_interval=100)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda m: m / warmup if m < warmup else (total - m) / (total - warmup))
    truth = torch.randn(16, 10)
    for step in range(1, n + 1):
        x = torch.randn(32, 16)
        y = (x @ truth).argmax(1)
        if spoiled(step):
            x[0] = 3e38  # finite; in fp16 it is Inf
        with torch.autocast("cpu", torch.float16):
            logits = model(x)
        loss = F.cross_entropy(logits[1:].float(), y[1:]) + 0 * logits[0].float().sum()
        opt.zero_grad()
        shown = F.cross_entropy(logits[1:].float(), y[1:])
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = scaler.get_scale()
        scaler.step(opt)
        scaler.update()
        if scaler.get_scale() >= scale:
            schedule.step()
        yield {
            "step": step,
            "loss": shown.item(),
            "grad_norm": norm.item(),
            "lr": schedule.get_last_lr()[0],
            "scale": scaler.get_scale(),
        }


@log(
    "torch_scale_collapse.jsonl",
    "fp16 autocast and GradScaler; every batch after step 30 overflows in the forward",
    "scale-collapse",
    step=(31, 32),
)
def _(path):
    jsonl(path, list(scaled(90, lambda step: step > 30)))


@log(
    "torch_scaler_skips.log",
    "The same with a third of the batches bad, as a Trainer's dictionaries without scale: only the rate tells",
    "scaler-skipping",
    line=(1, 2),
)
def _(path):
    with said(path):
        for row in scaled(96, lambda step: step * 7919 % 23 < 9):
            if row["step"] % 10 == 0:
                shown = {"loss": round(row["loss"], 4), "grad_norm": row["grad_norm"], "learning_rate": row["lr"]}
                print({**shown, "epoch": round(row["step"] / 32, 2)})


@log(
    "torch_scaler_first_steps.jsonl",
    "Healthy fp16: a scale of 2^16 that is too high for the first steps",
    "nan-gradient",
    severity="note",
    step=(1, 3),
)
def _(path):
    jsonl(path, [{k: v for k, v in row.items() if k != "scale"} for row in scaled(120, lambda step: step in (2, 3))])


@log("healthy_torch.jsonl", "300 steps, constant rate; JSON lines")
def _(path):
    jsonl(path, list(steps(300, evaluate=50)))


@log("healthy_nanogpt.log", "nanoGPT's lines, warm-up and cosine")
def _(path):
    with said(path):
        for row in steps(500, lr=lambda s: 3e-3 * min(s / 50, 0.5 * (1 + math.cos(math.pi * s / 500))), evaluate=100):
            if row["step"] % 5 == 0 or "eval_loss" in row:
                nanogpt(row)


@log("healthy_restarts.csv", "A cosine with restarts, small batches; CSV")
def _(path):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["step", "loss", "grad_norm", "lr"])
        writer.writeheader()
        writer.writerows(steps(400, size=8, lr=lambda s: 1e-2 * 0.5 * (1 + math.cos(math.pi * (s % 100) / 100))))


@log("healthy_resumed.log", "Stopped at step 100, resumed from step 80: twenty steps twice")
def _(path):
    rows = list(steps(200, seed=5))
    with said(path):
        for row in [*rows[:100], None, *rows[80:]]:
            if row is None:
                print("Resuming training from checkpoint-80")
            else:
                print(f"step {row['step']} | loss {row['loss']:.5f} | grad_norm {row['grad_norm']:.3f} | lr {row['lr']:.1e}")


@log("healthy_policy.jsonl", "REINFORCE with a baseline on a bandit: a loss about 0 of either sign")
def _(path):
    torch.manual_seed(2)
    logits, rewards = nn.Parameter(torch.zeros(8)), torch.rand(8)
    opt = torch.optim.Adam([logits], lr=0.02)
    rows = []
    for step in range(250):
        taken = torch.distributions.Categorical(logits=logits).sample((64,))
        gained = rewards[taken] + 0.1 * torch.randn(64)
        loss = -(torch.log_softmax(logits, 0)[taken] * (gained - gained.mean()) / gained.std()).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        rows.append({"step": step, "loss": loss.item(), "grad_norm": logits.grad.norm().item(), "lr": 0.02})
    jsonl(path, rows)


@log("healthy_fp16.jsonl", "fp16 autocast with GradScaler and nothing wrong: scale and rate in the log")
def _(path):
    jsonl(path, list(scaled(200, lambda step: False, warmup=20)))


@log("healthy_tqdm.log", "A tqdm bar with the loss behind it, carriage returns kept")
def _(path):
    from tqdm import tqdm

    with said(path) as text:
        bar = tqdm(steps(150), total=150, file=text, mininterval=0, ncols=80)
        for row in bar:
            bar.set_postfix(loss=row["loss"])
