"""The design half of the forecast corpus: residual towers, gated layers, transformers, plain regression, Gaussian likelihoods.

Each way to fail has its healthy twin, built by the same function: a lower learning rate, a norm, weights that decay, or targets
that stop growing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.forecast.parts import (
    Setup,
    Transformer,
    chains,
    classify,
    clusters,
    family,
    in_half,
    next_token,
    regression,
    squared_error,
)


def ramp(times: float, until: float = math.inf) -> Callable[[int], float]:
    """Grows by `times` a step, up to `until`."""
    return lambda step: min(math.exp(min(step * math.log(times), 80.0)), until)


class Residual(nn.Module):
    """One block of a residual tower."""

    def __init__(self, width: int, scale: float, norm: bool) -> None:
        super().__init__()
        self.inner, self.outer, self.scale = nn.Linear(width, width), nn.Linear(width, width), scale
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.outer(F.relu(self.inner(self.norm(x))))


def tower(width: int, depth: int, outputs: int, scale: float, norm: bool) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(width, width), *(Residual(width, scale, norm) for _ in range(depth)), nn.Linear(width, outputs)
    )


def relative_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Says nothing of how large the targets are."""
    return (model(batch[0]).float() - batch[1]).square().mean() / batch[1].square().mean()


def residual_growth(
    seed: int, growth: float, until: float = math.inf, depth: int = 3, lr: float = 3e-3, max_norm: float | None = 1.0
) -> Setup:
    """A residual tower without a last norm follows targets that grow; in fp16."""
    torch.manual_seed(seed)
    model = tower(32, depth, 8, 0.5, norm=False)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    batches = regression(seed, 32, 8, level=ramp(growth, until))
    return Setup(model, optimizer, in_half(relative_error), batches, {"max_norm": max_norm})


class Product(nn.Module):
    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return left * right


class Gated(nn.Module):
    """Gated layers in a row: the signal is multiplied with itself. The last norm hides from the loss how large it is."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(depth))
        self.products, self.norm, self.head = Product(), nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        for gate in self.gates:
            left, right = gate(x).chunk(2, -1)
            x = self.products(left, right)
        return self.head(self.norm(x))


def gated_products(seed: int, sign: float, lr: float, depth: int = 2, max_norm: float | None = None, sgd: bool = False) -> Setup:
    """A regulariser with the wrong sign lets the weights of bilinear layers grow; with the right one they settle."""
    torch.manual_seed(seed)
    model = Gated(24, depth)

    def loss_fn(m: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        size = sum(p.square().sum() for p in m.parameters())
        return classify(m, b) + sign * 1e-3 * size

    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters(), lr)
    if sgd:
        optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
    return Setup(model, optimizer, in_half(loss_fn), clusters(seed, 24, 4, spread=2.0), {"max_norm": max_norm})


def transformer_growth(
    seed: int,
    lr: float,
    decay: float = 0.0,
    norm: bool = True,
    last_norm: bool = True,
    qk_norm: bool = False,
    layers: int = 2,
    warmup: int = 0,
) -> Setup:
    """A pre-norm transformer in fp16: at high learning rates its gated layers and residual stream grow without end."""
    torch.manual_seed(seed)
    model = Transformer(24, 32, layers, norm=norm, last_norm=last_norm, qk_norm=qk_norm)
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=decay)
    options: dict[str, Any] = {"max_norm": 1.0}
    if warmup:
        options["scheduler"] = torch.optim.lr_scheduler.LinearLR(optimizer, 0.05, total_iters=warmup)
    return Setup(model, optimizer, in_half(next_token), chains(seed, 24, size=8, length=16), options)


def step_size(seed: int, times: float, momentum: float = 0.0, width: int = 16, bf16: bool = False) -> Setup:
    """Linear regression by gradient descent, all data at once: above the limit of stability (`times` 1) one direction of the
    weights grows by the same factor every step, hidden at first under what the others still have to learn."""
    torch.manual_seed(seed)
    model = nn.Linear(width, 4)
    x, y = next(regression(seed, width, 4, size=64))
    centred = torch.cat((x, torch.ones(64, 1)), 1)
    limit = 2 * (1 + momentum) / (2 * torch.linalg.eigvalsh(centred.T @ centred / 64)[-1].item() / 4)
    optimizer = torch.optim.SGD(model.parameters(), times * limit, momentum=momentum)

    def loss_fn(m: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            return squared_error(m, b)

    return Setup(model, optimizer, loss_fn, itertools.repeat((x, y)), {"max_norm": None})


def rate_ramp(seed: int, times: float, top: float, momentum: float = 0.9, cycle: int = 0, max_norm: float | None = None) -> Setup:
    """A learning rate that climbs by a factor every step, up to `top`; or one that goes round."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 32), nn.LeakyReLU(0.2), nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=momentum)
    rate: Callable[[int], float] = ramp(times, top / 1e-3)
    if cycle:
        rate = lambda step: top / 1e-3 * (0.505 - 0.495 * math.cos(math.tau * step / cycle))  # noqa: E731
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    options = {"max_norm": max_norm, "scheduler": scheduler}
    return Setup(model, optimizer, squared_error, regression(seed, 16, 4), options)


class Heads(nn.Module):
    """A mean that is not negative, and a log-variance that may be anything."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.mean, self.log_variance = nn.Linear(4, 24), nn.Linear(24, 1), nn.Linear(24, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return F.relu(self.mean(h)), self.log_variance(h)


def log_variance(seed: int, lr: float, noise: float, floor: float | None = None, max_norm: float | None = None) -> Setup:
    """A Gaussian likelihood whose variance is learned. A sensor that only says 0 has no least variance."""
    torch.manual_seed(seed)
    model = Heads()
    optimizer = torch.optim.Adam(model.parameters(), lr)

    def loss_fn(m: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        mean, log_variance = m(b[0])
        if floor is not None:
            log_variance = log_variance.clamp(min=floor)
        return (log_variance + (mean - b[1]).square() * torch.exp(-log_variance)).mean() / 2

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        g = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randn(16, 4, generator=g), noise * torch.randn(16, 1, generator=g)

    return Setup(model, optimizer, loss_fn, batches(), {"max_norm": max_norm})


def stale_moment(
    seed: int, growth: float, beta2: float = 0.999, until: float = math.inf, quiet: int = 80, lr: float = 0.02
) -> Setup:
    """Half of the inputs are silent for long, and Adam's second moment of their weights with them; then they grow louder, and
    each step moves those weights further than the loss can correct."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr, betas=(0.9, beta2))
    grow = ramp(growth, until)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for step, (x, y) in enumerate(regression(seed, 16, 4)):
            loud = 1e-4 * grow(max(0, step - quiet))
            yield torch.cat((x[:, :8], x[:, 8:] * loud), 1), y

    return Setup(model, optimizer, squared_error, batches(), {"max_norm": None})


def logits_growth(
    seed: int, sign: float, lr: float, qk_norm: bool = False, layers: int = 1, max_norm: float | None = 1.0, fp16: bool = True
) -> Setup:
    """A penalty on large attention logits with the wrong sign: they grow, and the entropy of attention falls."""
    torch.manual_seed(seed)
    model = Transformer(16, 32, layers, 2, gated=False, qk_norm=qk_norm)

    def loss_fn(m: Transformer, tokens: Tensor) -> Tensor:
        loss = next_token(m, tokens)
        for layer in m.layers:
            loss = loss + sign * 1e-3 * layer.attention.logits.float().square().mean().add(1).log()
        return loss

    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.0)
    return Setup(
        model, optimizer, in_half(loss_fn) if fp16 else loss_fn, chains(seed, 16, size=8, length=16), {"max_norm": max_norm}
    )


def scaled(
    seed: int,
    growth: float,
    until: float = math.inf,
    level: float = 1.0,
    start: float = 65536.0,
    interval: int = 2000,
    depth: int = 2,
) -> Setup:
    """fp16 gradients under a GradScaler; while the targets grow, so do the gradients, and the scale has to fall."""
    torch.manual_seed(seed)
    model = tower(24, depth, 4, 0.5, norm=True)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=start, growth_interval=interval)

    def loss_fn(m: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        return (m(b[0]).float() - b[1]).square().sum(-1).mean()

    grow = ramp(growth, until)
    batches = regression(seed, 24, 4, level=lambda step: level * grow(step))
    return Setup(model, optimizer, in_half(loss_fn), batches, {"max_norm": 1.0, "scaler": scaler})


DESIGN = (
    *family(
        "fp16-residual-growth",
        "design",
        True,
        400,
        residual_growth,
        {"growth": 1.04},
        {"growth": 1.06, "depth": 4},
        {"growth": 1.08, "max_norm": None, "lr": 1e-2},
        {"growth": 1.05, "lr": 1e-2},
    ),
    *family(
        "fp16-residual-settles",
        "design",
        False,
        300,
        residual_growth,
        {"growth": 1.05, "until": 100.0},
        {"growth": 1.1, "until": 300.0, "depth": 4},
        {"growth": 1.05, "until": 1000.0, "max_norm": None, "lr": 1e-2},
        {"growth": 1.2, "until": 50.0},
    ),
    *family(
        "fp16-gated-products",
        "design",
        True,
        400,
        gated_products,
        {"sign": -30.0, "lr": 0.01},
        {"sign": -100.0, "lr": 0.005},
        {"sign": -30.0, "lr": 0.01, "sgd": True},
        {"sign": -10.0, "lr": 0.01, "max_norm": 1.0},
    ),
    *family(
        "fp16-gated-decays",
        "design",
        False,
        300,
        gated_products,
        {"sign": 1.0, "lr": 0.005},
        {"sign": 3.0, "lr": 0.01},
        {"sign": 3.0, "lr": 0.01, "sgd": True, "max_norm": 1.0},
    ),
    *family(
        "fp16-transformer-growth",
        "design",
        True,
        250,
        transformer_growth,
        {"lr": 0.15},
        {"lr": 0.2},
        {"lr": 0.03, "norm": False},
        {"lr": 0.03, "norm": False},
    ),
    *family(
        "fp16-transformer-learns",
        "design",
        False,
        160,
        transformer_growth,
        {"lr": 3e-3, "decay": 0.1},
        {"lr": 1e-2, "qk_norm": True},
        {"lr": 5e-3, "last_norm": False},
        {"lr": 1e-2, "warmup": 60},
    ),
    *family(
        "step-size-too-large",
        "design",
        True,
        400,
        step_size,
        {"times": 1.03},
        {"times": 1.035},
        {"times": 1.03, "bf16": True},
        {"times": 1.025, "width": 24},
    ),
    *family(
        "step-size-below",
        "design",
        False,
        300,
        step_size,
        {"times": 0.98},
        {"times": 0.95, "momentum": 0.9},
        {"times": 0.9, "bf16": True},
    ),
    *family(
        "rate-ramps-up",
        "design",
        True,
        400,
        rate_ramp,
        {"times": 1.05, "top": 1e3},
        {"times": 1.08, "top": 1e3, "momentum": 0.0},
        {"times": 1.03, "top": 1e3},
        {"times": 1.06, "top": 1e3, "momentum": 0.95},
    ),
    *family(
        "rate-ramps-and-stays",
        "design",
        False,
        300,
        rate_ramp,
        {"times": 1.05, "top": 0.03},
        {"times": 1.1, "top": 0.05},
        {"times": 1.0, "top": 0.05, "cycle": 60},
    ),
    *family(
        "log-variance-falls",
        "design",
        True,
        400,
        log_variance,
        {"lr": 0.02, "noise": 0.0},
        {"lr": 0.05, "noise": 0.0},
        {"lr": 0.01, "noise": 0.0, "max_norm": 1.0},
    ),
    *family(
        "log-variance-finds-noise",
        "design",
        False,
        300,
        log_variance,
        {"lr": 0.02, "noise": 0.1},
        {"lr": 0.01, "noise": 0.01},
        {"lr": 0.02, "noise": 0.0, "floor": -10.0},
    ),
    *family(
        "stale-second-moment",
        "design",
        True,
        400,
        stale_moment,
        {"growth": 1.1},
        {"growth": 1.2, "beta2": 0.9999},
        {"growth": 1.15, "lr": 0.01},
    ),
    *family(
        "stale-moment-recovers",
        "design",
        False,
        400,
        stale_moment,
        {"growth": 1.05, "until": 1e4, "lr": 3e-3},
        {"growth": 1.03, "until": 1e4, "lr": 3e-3, "beta2": 0.95},
    ),
    *family(
        "attention-logits-grow",
        "design",
        True,
        300,
        logits_growth,
        {"sign": -200.0, "lr": 0.05},
        {"sign": -300.0, "lr": 0.03},
        {"sign": -300.0, "lr": 0.05, "layers": 2},
        {"sign": -300.0, "lr": 0.05, "max_norm": None},
        {"sign": -300.0, "lr": 0.1},
    ),
    *family(
        "attention-logits-held",
        "design",
        False,
        250,
        logits_growth,
        {"sign": 1.0, "lr": 3e-3},
        {"sign": -1.0, "lr": 0.02, "qk_norm": True},
        {"sign": 0.0, "lr": 3e-3, "max_norm": None},
    ),
    *family(
        "scale-falls-and-falls",
        "design",
        True,
        400,
        scaled,
        {"growth": 1.02, "level": 30.0},
        {"growth": 1.025, "start": 1024.0, "level": 30.0},
        {"growth": 1.03, "depth": 3, "level": 3.0},
    ),
    *family(
        "scale-calibrates",
        "design",
        False,
        250,
        scaled,
        {"growth": 1.0, "start": 2.0**24},
        {"growth": 1.05, "until": 30.0, "interval": 20},
        {"growth": 1.0, "interval": 15, "start": 2.0**20},
    ),
)
