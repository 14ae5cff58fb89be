"""The holdout half of the forecast corpus, second part: objectives without a bound. Critics, values, counts, contrast, latents.

None of these objectives is in the design half. Each way to fail has its healthy twin, built by the same function.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.forecast.parts import Setup, family, half, in_half


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


OBJECTIVES = (
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
        {"lr": 0.03, "discount": 0.95, "target": 10},
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
)
