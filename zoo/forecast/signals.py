"""The holdout half of the forecast corpus, first part: signals that grow on their way through recurrent nets, convolutions, state
spaces, deep linear nets and bags of features.

None of these models is in the design half. Each way to fail has its healthy twin, built by the same function.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.forecast.parts import Setup, classify, family, in_half, regression


class Cell(nn.Module):
    """One step of a recurrent net that nothing squashes."""

    def __init__(self, inputs: int, width: int, radius: float, act: str) -> None:
        super().__init__()
        self.inward, self.around = nn.Linear(inputs, width), nn.Linear(width, width, bias=False)
        nn.init.orthogonal_(self.around.weight, radius)
        self.act = {"none": nn.Identity(), "relu": nn.ReLU(), "tanh": nn.Tanh()}[act]

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        return self.act(self.inward(x) + self.around(h))


class Recurrent(nn.Module):
    def __init__(self, width: int, radius: float, act: str) -> None:
        super().__init__()
        self.cell, self.head = Cell(4, width, radius, act), nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(x.shape[0], self.cell.around.in_features)
        for t in range(x.shape[1]):
            h = self.cell(x[:, t], h)
        return self.head(h)


def recurrence(
    seed: int,
    lr: float,
    fp16: bool,
    act: str = "none",
    radius: float = 0.9,
    length: int = 32,
    memory: float = 1.0,
    max_norm: float | None = 1.0,
    sgd: bool = False,
) -> Setup:
    """A sum in which the first inputs weigh most, by `memory` a step: the spectral radius of the recurrence is driven there."""
    torch.manual_seed(seed)
    model = Recurrent(24, radius, act)
    made = torch.optim.SGD if sgd else torch.optim.Adam
    optimizer = made(model.parameters(), lr)
    loss_fn = in_half(relative) if fp16 else relative
    return Setup(model, optimizer, loss_fn, remember(seed, length, memory), {"max_norm": max_norm})


def remember(seed: int, length: int, memory: float) -> Iterator[tuple[Tensor, Tensor]]:
    g = torch.Generator().manual_seed(seed)
    weight = memory ** torch.arange(length).flip(0).float()
    while True:
        x = torch.randn(8, length, 4, generator=g)
        yield x, (x[:, :, 0] * weight).sum(1, keepdim=True)


def relative(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.huber_loss(model(batch[0]).float(), batch[1]) / batch[1].abs().mean()


class StateSpace(nn.Module):
    """A diagonal linear recurrence; its decay is learned in the open, so it can pass 1."""

    def __init__(self, width: int, decay: float, bounded: bool) -> None:
        super().__init__()
        self.inward, self.outward = nn.Linear(4, width), nn.Linear(width, 1)
        self.decay, self.bounded = nn.Parameter(torch.full((width,), decay)), bounded

    def forward(self, x: Tensor) -> Tensor:
        decay = torch.sigmoid(self.decay) if self.bounded else self.decay
        u, h = self.inward(x), 0.0
        for t in range(x.shape[1]):
            h = decay.to(u.dtype) * h + u[:, t]
        return self.outward(h)


def state_space(
    seed: int,
    lr: float,
    bounded: bool = False,
    fp16: bool = True,
    optimizer: str = "adam",
    length: int = 32,
    decay: float = 0.9,
    memory: float = 1.0,
) -> Setup:
    torch.manual_seed(seed)
    model = StateSpace(24, decay, bounded)
    made: dict[str, Any] = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}

    loss_fn = in_half(relative) if fp16 else relative
    return Setup(model, made[optimizer](model.parameters(), lr), loss_fn, remember(seed, length, memory), {"max_norm": None})


def convolution(
    seed: int,
    lr: float,
    norm: bool,
    fp16: bool = True,
    gain: float = 1.0,
    momentum: float = 0.9,
    adam: bool = False,
    max_norm: float | None = None,
    scaler: bool = False,
    rise: float = 1.0,
    until: float = math.inf,
) -> Setup:
    """Bright patches to classify. Without BatchNorm the contrast, which rises, goes through all layers."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 8), (8, 8), (8, 16)):
        conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        conv.weight.data *= gain
        layers += [conv, nn.BatchNorm2d(outputs) if norm else nn.Identity(), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 4))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr, momentum=momentum)
    if adam:
        optimizer = torch.optim.Adam(model.parameters(), lr)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        g = torch.Generator().manual_seed(seed)
        for step in range(10_000):
            labels = torch.randint(0, 4, (8,), generator=g)
            images = torch.randn(8, 1, 8, 8, generator=g) * 0.5
            for image, label in zip(images, labels.tolist(), strict=True):
                row, column = 4 * (label // 2), 4 * (label % 2)
                image[0, row : row + 4, column : column + 4] += 1
            yield images * min(rise**step, until), labels

    options: dict[str, Any] = {"max_norm": max_norm}
    if scaler:
        options["scaler"] = torch.amp.GradScaler("cpu", growth_interval=30)
    return Setup(model, optimizer, in_half(classify) if fp16 else classify, batches(), options)


def deep_linear(
    seed: int, lr: float, depth: int = 6, momentum: float = 0.9, gain: float = 1.0, dtype: str = "fp32", push: float = 0.0
) -> Setup:
    """A deep linear net with momentum: all layers grow together, and with them the curvature."""
    torch.manual_seed(seed)
    layers = [nn.Linear(16, 16, bias=False) for _ in range(depth)]
    for layer in layers:
        nn.init.orthogonal_(layer.weight, gain)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=momentum)

    def loss_fn(m: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16 if dtype == "bf16" else torch.float16, enabled=dtype != "fp32"):
            said = m(b[0]).float()
        return F.mse_loss(said, b[1]) if not push else -push * said.square().mean().add(1).log()

    return Setup(model, optimizer, loss_fn, regression(seed, 16, 16), {"max_norm": None})


def rare_rows(seed: int, lr: float, alpha: float, quiet: int = 80, times: float = 1.1, until: float = math.inf) -> Setup:
    """RMSprop with a long memory on a bag of features; after a quiet time one that was hardly there grows and grows."""
    torch.manual_seed(seed)
    bag = nn.EmbeddingBag(32, 24, mode="sum")
    model = nn.ModuleDict({"bag": bag, "rest": nn.Linear(24, 2)})
    optimizer = torch.optim.RMSprop(model.parameters(), lr, alpha=alpha)

    def loss_fn(m: nn.ModuleDict, b: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return F.mse_loss(m["rest"](m["bag"](b[0], per_sample_weights=b[1])), b[2])

    def batches() -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        g = torch.Generator().manual_seed(seed)
        for step in range(10_000):
            features, weights = torch.randint(0, 31, (16, 6), generator=g), torch.full((16, 6), 0.1)
            features[:, 0], weights[:, 0] = 31, 1e-3 * min(times ** max(0, step - quiet), until)
            yield features, weights, 0.1 * torch.randn(16, 2, generator=g)

    return Setup(model, optimizer, loss_fn, batches(), {"max_norm": None})


SIGNALS = (
    *family(
        "fp16-recurrence",
        "holdout",
        True,
        300,
        recurrence,
        {"lr": 0.002, "fp16": True, "memory": 1.5, "radius": 1.0},
        {"lr": 0.001, "fp16": True, "memory": 1.4, "radius": 1.0, "max_norm": None},
        {"lr": 0.001, "fp16": True, "memory": 1.5, "radius": 1.0, "max_norm": None},
    ),
    *family(
        "recurrence-remembers",
        "holdout",
        False,
        200,
        recurrence,
        {"lr": 0.003, "fp16": True, "memory": 1.1},
        {"lr": 0.003, "fp16": False, "act": "tanh"},
        {"lr": 0.001, "fp16": True, "memory": 1.05, "radius": 1.0, "max_norm": None},
    ),
    *family(
        "state-space-passes-one",
        "holdout",
        True,
        300,
        state_space,
        {"lr": 0.003, "memory": 1.5},
        {"lr": 0.01, "memory": 1.4},
        {"lr": 0.05, "memory": 1.1, "fp16": False, "optimizer": "sgd"},
        {"lr": 0.003, "memory": 1.4},
    ),
    *family(
        "state-space-bounded",
        "holdout",
        False,
        300,
        state_space,
        {"lr": 0.01, "memory": 1.0},
        {"lr": 0.01, "bounded": True, "decay": 2.0},
        {"lr": 0.003, "memory": 1.15},
    ),
    *family(
        "fp16-brightness-rises",
        "holdout",
        True,
        300,
        convolution,
        {"lr": 0.003, "norm": False, "adam": True, "rise": 1.05},
        {"lr": 0.01, "norm": False, "rise": 1.05, "max_norm": 1.0},
        {"lr": 0.01, "norm": False, "rise": 1.06, "scaler": True},
        {"lr": 0.01, "norm": False, "rise": 1.05},
    ),
    *family(
        "convolution-settles",
        "holdout",
        False,
        200,
        convolution,
        {"lr": 0.01, "norm": False, "rise": 1.05, "max_norm": 1.0, "until": 100.0},
        {"lr": 0.03, "norm": True, "rise": 1.03, "until": 20.0},
        {"lr": 0.03, "norm": True, "rise": 1.06, "until": 1500.0},
        {"lr": 0.01, "norm": False, "scaler": True, "rise": 1.03, "until": 50.0, "max_norm": 1.0},
    ),
    *family(
        "fp16-deep-linear-grows",
        "holdout",
        True,
        400,
        deep_linear,
        {"lr": 0.005, "push": 1.0, "dtype": "fp16"},
        {"lr": 0.01, "push": 1.0, "dtype": "fp16"},
        {"lr": 0.005, "push": 1.0, "dtype": "fp16", "depth": 8},
    ),
    *family(
        "deep-linear-fits",
        "holdout",
        False,
        300,
        deep_linear,
        {"lr": 0.03},
        {"lr": 0.1, "dtype": "bf16"},
        {"lr": 0.01, "dtype": "fp16", "gain": 1.2},
    ),
    *family(
        "rare-feature-grows",
        "holdout",
        True,
        400,
        rare_rows,
        {"lr": 0.01, "alpha": 0.9999, "times": 1.1},
        {"lr": 0.003, "alpha": 0.999, "times": 1.1},
        {"lr": 0.003, "alpha": 0.9999, "times": 1.1},
    ),
    *family(
        "rare-feature-settles",
        "holdout",
        False,
        400,
        rare_rows,
        {"lr": 0.003, "alpha": 0.99, "times": 1.05, "until": 300.0},
        {"lr": 0.003, "alpha": 0.99, "times": 1.1, "until": 100.0},
    ),
)
