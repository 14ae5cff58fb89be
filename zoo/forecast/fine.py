"""Healthy runs of the forecast corpus that are no twin of a failing one: growth that settles, noise, games, language.

All of them rise somewhere for a while, or are noisy, or meet large values that stay: what a forecaster must not cry about.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanproof.cli._demo import documents, encode_text
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
from zoo.healthy import VOCABULARY
from zoo.healthy import Recurrent as Lstm
from zoo.llama import Llama, next_token_loss


def plateau(seed: int, level: float, lr: float, decay: bool = False, depth: int = 2, scaler: bool = False) -> Setup:
    """Targets far larger than a new net's outputs, in fp16: activations rise to a few thousand, and stay."""
    torch.manual_seed(seed)
    hidden = [layer for _ in range(depth) for layer in (nn.Linear(32, 32), nn.GELU())]
    model = nn.Sequential(nn.Linear(16, 32), *hidden, nn.Linear(32, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr)
    options: dict[str, Any] = {"max_norm": 1.0}
    if decay:
        options["scheduler"] = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 300)
    if scaler:
        options["scaler"] = torch.amp.GradScaler("cpu", growth_interval=25)

    def loss_fn(m: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        return F.smooth_l1_loss(m(b[0]).float() / level, b[1] / level)

    return Setup(model, optimizer, in_half(loss_fn), regression(seed, 16, 4, level=lambda step: level), options)


def curriculum(seed: int, growth: float, until: float, fp16: bool = True, lr: float = 1e-3) -> Setup:
    """Inputs get larger from step to step, and then stay."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.01)
    batches = regression(seed, 16, 4, inputs=lambda step: min(growth ** min(step, 1000), until))
    return Setup(model, optimizer, in_half(squared_error) if fp16 else squared_error, batches, {"max_norm": 1.0})


class Outlier(nn.Module):
    """A transformer whose first token gets a learned sink: a few features that become massive and stay so."""

    def __init__(self, most: float) -> None:
        super().__init__()
        self.body, self.sink, self.most = Transformer(24, 32, 2, 2), nn.Parameter(torch.zeros(32)), most

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.body.embed(tokens)
        x = torch.cat((x[:, :1] + self.most * torch.tanh(self.sink), x[:, 1:]), 1)
        for layer in self.body.layers:
            x = layer(x)
        return self.body.head(self.body.norm(x))


def massive(seed: int, most: float, lr: float, fp16: bool = True) -> Setup:
    torch.manual_seed(seed)
    model = Outlier(most)
    rest = list(model.body.parameters())
    optimizer = torch.optim.AdamW([{"params": rest, "lr": lr}, {"params": [model.sink], "lr": 0.03}], weight_decay=0.01)

    def loss_fn(m: Outlier, tokens: Tensor) -> Tensor:
        return next_token(m, tokens) - 0.1 * torch.tanh(m.sink[:3]).mean()

    batches = chains(seed, 24, size=8, length=16)
    return Setup(model, optimizer, in_half(loss_fn) if fp16 else loss_fn, batches, {"max_norm": 1.0})


def catapult(seed: int, lr: float, width: int = 64, momentum: float = 0.0) -> Setup:
    """A step size above the limit of the first weights: the loss climbs, until the net has found a flatter place."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, width, bias=False), nn.Linear(width, 1, bias=False))
    for layer in model:
        nn.init.normal_(layer.weight, std=1 / math.sqrt(layer.in_features))
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=momentum)
    return Setup(model, optimizer, squared_error, itertools.repeat(next(regression(seed, 8, 1, size=32))), {"max_norm": None})


def small_batches(seed: int, size: int, lr: float, momentum: float = 0.9, max_norm: float | None = None) -> Setup:
    """Two samples a step: losses and norms go up and down by factors of ten."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=momentum)
    return Setup(model, optimizer, classify, clusters(seed, 16, 8, size=size, spread=0.8), {"max_norm": max_norm})


@cache
def text() -> Tensor:
    """Characters of the standard library's documentation, documents of at least 32."""
    return encode_text([document for document in documents() if len(document) >= 32])[0][:, :24]


def language(seed: int, kind: str, lr: float, size: int = 8, warmup: int = 20, cycle: int = 0, max_norm: Any = 1.0) -> Setup:
    """Characters of documentation: an LSTM, or a small Llama in fp16 or bf16."""
    torch.manual_seed(seed)
    model = Lstm()
    if kind != "lstm":
        model = Llama(hidden=32, layers=2, heads=2, kv_heads=2, intermediate=64, vocab=VOCABULARY, length=24)
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    scheduler: Any = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warmup, total_iters=warmup)
    if cycle:
        scheduler = torch.optim.lr_scheduler.CyclicLR(optimizer, lr / 20, lr, cycle // 2, cycle_momentum=False)
    dtype = {"lstm": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[kind]

    def loss_fn(m: nn.Module, tokens: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            return next_token_loss(m, tokens)

    def batches() -> Iterator[Tensor]:
        g = torch.Generator().manual_seed(seed)
        while True:
            yield text()[torch.randint(len(text()), (size,), generator=g)]

    return Setup(model, optimizer, loss_fn, batches(), {"max_norm": max_norm, "scheduler": scheduler})


def game(seed: int, lr: float, guard: str) -> Setup:
    """A GAN on a circle. The side that is guarded is trained by the guard, the other one between the batches."""
    torch.manual_seed(seed)
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
    critic = nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    mine, other = (critic, generator) if guard == "critic" else (generator, critic)
    adam, others = (torch.optim.Adam(m.parameters(), lr, betas=(0.5, 0.9)) for m in (mine, other))

    def judge(_: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        return F.softplus(-critic(b[0])).mean() + F.softplus(critic(generator(b[1]).detach())).mean()

    def forge(_: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        return F.softplus(-critic(generator(b[1]))).mean()

    sides: tuple[Callable[..., Tensor], Callable[..., Tensor]] = (judge, forge) if guard == "critic" else (forge, judge)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        g = torch.Generator().manual_seed(seed)
        while True:
            angle = torch.rand(32, generator=g) * math.tau
            real = torch.stack((angle.cos(), angle.sin()), 1)
            found = torch.autograd.grad(sides[1](other, (real, torch.randn(32, 8, generator=g))), list(other.parameters()))
            for p, gradient in zip(other.parameters(), found, strict=True):
                p.grad = gradient
            others.step()
            yield real, torch.randn(32, 8, generator=g)

    return Setup(mine, adam, sides[0], batches(), {"max_norm": None})


def reinforce(seed: int, lr: float, baseline: bool, reward: float = 1.0) -> Setup:
    """A policy gradient: losses of either sign, and logits that grow while the policy makes up its mind."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 3))

    def loss_fn(m: nn.Module, b: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return -(torch.log_softmax(m(b[0]), -1).gather(1, b[1]).squeeze(1) * b[2]).mean()

    def batches() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        g = torch.Generator().manual_seed(seed)
        while True:
            state = torch.randn(16, 4, generator=g)
            with torch.no_grad():
                action = torch.multinomial(model(state).softmax(-1), 1, generator=g)
            gain = reward * (action.squeeze(1) == state[:, :3].argmax(1)).float()
            yield state, action, gain - gain.mean() if baseline else gain

    return Setup(model, torch.optim.AdamW(model.parameters(), lr), loss_fn, batches(), {"max_norm": 1.0})


def denoise(seed: int, lr: float, fp16: bool) -> Setup:
    """A small diffusion model: the noise level is another one for every sample."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 48), nn.SiLU(), nn.Linear(48, 48), nn.SiLU(), nn.Linear(48, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        g = torch.Generator().manual_seed(seed)
        while True:
            angle, level = torch.rand(16, generator=g) * math.tau, (2 * torch.randn(16, 1, generator=g)).exp()
            noise = torch.randn(16, 2, generator=g)
            x = torch.stack((angle.cos(), angle.sin()), 1) + level * noise
            yield torch.cat((x / (1 + level * level).sqrt(), level.log() / 4), 1), noise

    return Setup(model, optimizer, in_half(squared_error) if fp16 else squared_error, batches(), {"max_norm": 1.0})


FINE = (
    *family(
        "fp16-plateau",
        "design",
        False,
        300,
        plateau,
        {"level": 300.0, "lr": 1e-2},
        {"level": 2000.0, "lr": 2e-2, "decay": True},
        {"level": 12000.0, "lr": 3e-2},
        {"level": 2000.0, "lr": 3e-2, "depth": 4},
        {"level": 1000.0, "lr": 1e-2, "scaler": True},
        {"level": 8000.0, "lr": 1e-1},
    ),
    *family("catapult", "design", False, 200, catapult, {"lr": 0.06}, {"lr": 0.08}, {"lr": 0.08}),
    *family(
        "curriculum",
        "design",
        False,
        300,
        curriculum,
        {"growth": 1.05, "until": 100.0},
        {"growth": 1.04, "until": 300.0},
        {"growth": 1.04, "until": 300.0, "lr": 3e-3},
        {"growth": 1.1, "until": 30.0, "fp16": False},
    ),
    *family(
        "massive-activations",
        "holdout",
        False,
        200,
        massive,
        {"most": 500.0, "lr": 3e-3},
        {"most": 3000.0, "lr": 1e-2, "fp16": False},
        {"most": 12000.0, "lr": 3e-3},
    ),
    *family(
        "small-batches",
        "design",
        False,
        400,
        small_batches,
        {"size": 2, "lr": 0.02},
        {"size": 2, "lr": 0.05, "momentum": 0.0},
        {"size": 4, "lr": 0.05, "max_norm": 1.0},
    ),
    *family(
        "language",
        "holdout",
        False,
        120,
        language,
        {"kind": "lstm", "lr": 3e-3},
        {"kind": "lstm", "lr": 1e-2, "size": 2, "cycle": 60},
        {"kind": "fp16", "lr": 3e-3},
        {"kind": "fp16", "lr": 1e-2, "warmup": 80},
        {"kind": "bf16", "lr": 3e-3, "size": 4, "max_norm": "auto"},
    ),
    *family(
        "game",
        "holdout",
        False,
        400,
        game,
        {"lr": 2e-3, "guard": "critic"},
        {"lr": 5e-3, "guard": "critic"},
        {"lr": 2e-3, "guard": "generator"},
    ),
    *family(
        "policy-gradient",
        "holdout",
        False,
        400,
        reinforce,
        {"lr": 3e-3, "baseline": True},
        {"lr": 1e-2, "baseline": True, "reward": 10.0},
        {"lr": 1e-2, "baseline": False},
    ),
    *family("denoising", "holdout", False, 400, denoise, {"lr": 3e-3, "fp16": True}, {"lr": 1e-2, "fp16": False}),
)
