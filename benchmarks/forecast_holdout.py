"""The holdout half of the forecast corpus: recurrent nets, convolutions, critics, values, counts, contrast, latents, state spaces.

None of these models is in the design half. Each way to fail has its healthy twin, built by the same function.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forecast_parts import Setup, classify, family, half, in_half, regression


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


def critic(seed: int, lr: float, clip: float | None = None, penalty: float = 0.0, optimizer: str = "rmsprop") -> Setup:
    """The critic of a Wasserstein GAN in fp16. Nothing bounds its output but clipped weights or a penalty."""
    torch.manual_seed(seed)
    generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8))
    model = nn.Sequential(nn.Linear(8, 48), nn.LeakyReLU(0.2), nn.Linear(48, 48), nn.LeakyReLU(0.2), nn.Linear(48, 1))
    forger = torch.optim.RMSprop(generator.parameters(), 1e-3)
    made: dict[str, Any] = {"rmsprop": torch.optim.RMSprop, "adam": torch.optim.Adam}

    def loss_fn(m: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        with half():
            real, fake = m(b[0]).float(), m(b[1]).float()
        return fake.mean() - real.mean() + penalty * (real.square().mean() + fake.square().mean())

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        g = torch.Generator().manual_seed(seed)
        for step in range(10_000):
            if clip is not None:
                with torch.no_grad():
                    for p in model.parameters():
                        p.clamp_(-clip, clip)
            fake = generator(torch.randn(16, 4, generator=g))
            if step % 3 == 2:
                forger.zero_grad()
                generator_loss = -model(fake).mean()
                gradients = torch.autograd.grad(generator_loss, list(generator.parameters()))
                for p, gradient in zip(generator.parameters(), gradients, strict=True):
                    p.grad = gradient
                forger.step()
            yield 2 + torch.randn(16, 8, generator=g), fake.detach()

    return Setup(model, made[optimizer](model.parameters(), lr), loss_fn, batches(), {"max_norm": None})


def bootstrap(
    seed: int, lr: float, discount: float, dtype: str = "fp32", target: int = 0, max_norm: float | None = None
) -> Setup:
    """Q-learning off-policy from its own estimates: with features that generalise too far, values feed on themselves."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3))
    frozen = nn.Sequential(nn.Linear(6, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 3))
    frozen.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr)

    def loss_fn(m: nn.Module, b: tuple[Tensor, ...]) -> Tensor:
        state, action, reward, after = b
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == "bf16"):
            with torch.no_grad():
                value = reward + discount * (frozen if target else m)(after).float().amax(1)
            return F.mse_loss(m(state).float().gather(1, action[:, None]).squeeze(1), value)

    def batches() -> Iterator[tuple[Tensor, ...]]:
        g = torch.Generator().manual_seed(seed)
        for step in range(10_000):
            if target and step % target == 0:
                frozen.load_state_dict(model.state_dict())
            state = torch.rand(16, 6, generator=g)
            after = state * 1.3 if target == 0 else 0.5 * state
            yield state, torch.randint(0, 3, (16,), generator=g), state.mean(1), after

    return Setup(model, optimizer, loss_fn, batches(), {"max_norm": max_norm})


def counts(seed: int, lr: float, growth: float = 1.0, width: int = 16, momentum: float = 0.0, until: float = math.inf) -> Setup:
    """Poisson regression: the rate is the exponential of what the net says, and its curvature grows with it."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(width, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=momentum)

    def loss_fn(m: nn.Module, b: tuple[Tensor, Tensor]) -> Tensor:
        said = m(b[0]).squeeze(1)
        return (said.exp() - b[1] * said).mean()

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        g = torch.Generator().manual_seed(seed)
        for step in range(10_000):
            x = torch.randn(16, width, generator=g)
            yield x, torch.poisson((0.5 * x[:, 0]).exp() * min(growth**step, until), generator=g)

    return Setup(model, optimizer, loss_fn, batches(), {"max_norm": None})


class Towers(nn.Module):
    """Two encoders and a temperature, as in CLIP."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16)) for _ in range(2))
        self.norm, self.logit_scale, self.similarity = norm, nn.Parameter(torch.tensor(2.6)), Similarity()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        x, y = self.left(a), self.right(b)
        if self.norm:
            x, y = F.normalize(x, dim=-1), F.normalize(y, dim=-1)
        return self.similarity(x, y, self.logit_scale)


class Similarity(nn.Module):
    def forward(self, x: Tensor, y: Tensor, logit_scale: Tensor) -> Tensor:
        return (x * logit_scale.exp()) @ y.T


def contrast(
    seed: int, lr: float, scale_lr: float, most: float = math.inf, norm: bool = True, noise: float = 0.0, plain: bool = False
) -> Setup:
    """Contrastive learning in fp16 with a learned temperature. `plain`: the softmax was forgotten, so that larger is better."""
    torch.manual_seed(seed)
    model = Towers(norm)
    rest = [p for n, p in model.named_parameters() if n != "logit_scale"]
    optimizer = torch.optim.Adam([{"params": rest, "lr": lr}, {"params": [model.logit_scale], "lr": scale_lr}])

    def loss_fn(m: Towers, b: tuple[Tensor, Tensor]) -> Tensor:
        with half():
            logits = m(*b).float()
        if plain:
            return (logits.mean() - logits.diagonal().mean()) / 100
        return F.cross_entropy(logits, torch.arange(len(logits)))

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        g = torch.Generator().manual_seed(seed)
        mixing = torch.randn(12, 12, generator=g) / 3
        while True:
            with torch.no_grad():
                model.logit_scale.clamp_(max=most)
            x = torch.randn(8, 12, generator=g)
            yield x, x @ mixing + noise * torch.randn(8, 12, generator=g)

    return Setup(model, optimizer, loss_fn, batches(), {"max_norm": 1.0})


def latents(seed: int, beta: float, lr: float, fp16: bool = True, max_norm: float | None = None) -> Setup:
    """A variational autoencoder. With the sign of the KL term turned round its latents run away."""
    torch.manual_seed(seed)
    model = nn.ModuleDict({"encode": nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)), "decode": nn.Linear(4, 16)})
    optimizer = torch.optim.Adam(model.parameters(), lr)

    def loss_fn(m: nn.ModuleDict, x: Tensor) -> Tensor:
        mean, log_variance = m["encode"](x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        kl = (log_variance.float().exp() + mean.float().square() - 1 - log_variance.float()).mean()
        return F.mse_loss(m["decode"](z).float(), x) + beta * kl

    def batches() -> Iterator[Tensor]:
        g = torch.Generator().manual_seed(seed)
        mixing = torch.randn(3, 16, generator=g)
        while True:
            yield torch.randn(16, 3, generator=g) @ mixing

    return Setup(model, optimizer, in_half(loss_fn) if fp16 else loss_fn, batches(), {"max_norm": max_norm})


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


HOLDOUT = (
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
        "fp16-critic-unbounded",
        "holdout",
        True,
        400,
        critic,
        {"lr": 0.007},
        {"lr": 0.007},
        {"lr": 0.02, "optimizer": "adam"},
        {"lr": 0.02, "optimizer": "adam"},
    ),
    *family(
        "fp16-critic-bounded",
        "holdout",
        False,
        300,
        critic,
        {"lr": 0.003, "clip": 0.1},
        {"lr": 0.003, "penalty": 0.01},
        {"lr": 0.003, "penalty": 0.01, "optimizer": "adam"},
    ),
    *family(
        "values-feed-themselves",
        "holdout",
        True,
        400,
        bootstrap,
        {"lr": 0.02, "discount": 0.99},
        {"lr": 0.01, "discount": 0.99},
        {"lr": 0.02, "discount": 0.9, "dtype": "bf16"},
        {"lr": 0.005, "discount": 0.95},
    ),
    *family(
        "values-settle",
        "holdout",
        False,
        400,
        bootstrap,
        {"lr": 0.03, "discount": 0.5},
        {"lr": 0.03, "discount": 0.9, "target": 20},
        {"lr": 0.03, "discount": 0.6, "dtype": "bf16"},
    ),
    *family(
        "counts-explode",
        "holdout",
        True,
        400,
        counts,
        {"lr": 0.1, "growth": 1.02},
        {"lr": 0.03, "growth": 1.02},
        {"lr": 0.05, "growth": 1.015},
    ),
    *family("counts-fit", "holdout", False, 400, counts, {"lr": 0.1}, {"lr": 0.02, "growth": 1.01, "until": 5.0}),
    *family(
        "fp16-contrast-runs-away",
        "holdout",
        True,
        400,
        contrast,
        {"lr": 1e-3, "scale_lr": 0.03, "plain": True},
        {"lr": 1e-3, "scale_lr": 0.1, "plain": True},
        {"lr": 3e-3, "scale_lr": 0.01, "norm": False, "plain": True},
    ),
    *family(
        "fp16-contrast-learns",
        "holdout",
        False,
        300,
        contrast,
        {"lr": 1e-3, "scale_lr": 0.03},
        {"lr": 1e-3, "scale_lr": 0.1, "most": 4.6},
        {"lr": 1e-3, "scale_lr": 0.03, "noise": 1.0},
    ),
    *family(
        "fp16-latents-run-away",
        "holdout",
        True,
        400,
        latents,
        {"beta": -1.0, "lr": 0.003},
        {"beta": -0.1, "lr": 0.01},
        {"beta": -0.3, "lr": 0.01},
    ),
    *family(
        "fp16-latents-held",
        "holdout",
        False,
        300,
        latents,
        {"beta": 0.01, "lr": 0.003},
        {"beta": 0.1, "lr": 0.01, "max_norm": 1.0},
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
        "fp16-contrast-of-images-rises",
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
        {"lr": 0.03, "norm": True, "rise": 1.02},
        {"lr": 0.01, "norm": False, "scaler": True, "rise": 1.03, "until": 50.0},
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
        {"lr": 0.01, "alpha": 0.9999, "times": 1.07},
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
