"""What the runs of the forecast corpus are made of: the records, and the data and models that several of them share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Setup:
    """A training that is about to start."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_fn: Callable[[nn.Module, Any], Tensor]
    batches: Iterator[Any]
    options: dict[str, Any] = field(default_factory=dict)
    """Further keyword arguments of `nanproof.Guard`."""


@dataclass(frozen=True)
class Run:
    """One training, what becomes of it, and whether a forecaster may be designed on it."""

    name: str
    family: str
    fails: bool
    split: str
    """ "design" or "holdout"."""
    steps: int
    """At most so many."""
    make: Callable[[], Setup]
    """Seeds torch and builds everything: the same training every time."""


def family(name: str, split: str, fails: bool, steps: int, build: Callable[..., Setup], *variants: dict[str, Any]) -> list[Run]:
    """One run for each variant. Its place is its seed, unless it names one."""
    made = [{"seed": place, **variant} for place, variant in enumerate(variants)]
    return [Run(f"{name}/{i}", name, fails, split, steps, partial(build, **kwargs)) for i, kwargs in enumerate(made)]


def half() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.float16)


def in_half(loss_fn: Callable[[nn.Module, Any], Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    """The loss under fp16 autocast."""

    def autocast_loss(model: nn.Module, batch: Any) -> Tensor:
        with half():
            return loss_fn(model, batch)

    return autocast_loss


def squared_error(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]).float(), batch[1])


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens)[:, :-1].float().transpose(1, 2), tokens[:, 1:])


def regression(
    seed: int,
    width: int,
    outputs: int,
    *,
    size: int = 16,
    noise: float = 0.1,
    level: Callable[[int], float] = lambda step: 1.0,
    inputs: Callable[[int], float] = lambda step: 1.0,
) -> Iterator[tuple[Tensor, Tensor]]:
    """A teacher to follow: `inputs` times normal values in, `level` times what the teacher says out."""
    g = torch.Generator().manual_seed(seed + 1000)
    teacher = torch.randn(width, outputs, generator=g) / math.sqrt(width)
    step = 0
    while True:
        x = torch.randn(size, width, generator=g)
        y = torch.tanh(x @ teacher) + noise * torch.randn(size, outputs, generator=g)
        yield x * inputs(step), y * level(step)
        step += 1


def clusters(seed: int, width: int, classes: int, *, size: int = 16, spread: float = 1.0) -> Iterator[tuple[Tensor, Tensor]]:
    """Points around one centre a class."""
    g = torch.Generator().manual_seed(seed + 2000)
    centres = torch.randn(classes, width, generator=g)
    while True:
        labels = torch.randint(0, classes, (size,), generator=g)
        yield centres[labels] + spread * torch.randn(size, width, generator=g), labels


def chains(seed: int, vocabulary: int, *, size: int = 8, length: int = 24, sharp: float = 2.0) -> Iterator[Tensor]:
    """Sequences of a random Markov chain: something for a language model to learn in a hundred steps."""
    g = torch.Generator().manual_seed(seed + 3000)
    moves = torch.softmax(sharp * torch.randn(vocabulary, vocabulary, generator=g), -1)
    while True:
        tokens = [torch.randint(0, vocabulary, (size,), generator=g)]
        for _ in range(length - 1):
            tokens.append(torch.multinomial(moves[tokens[-1]], 1, generator=g).squeeze(1))
        yield torch.stack(tokens, 1)


class Attention(nn.Module):
    """One or more heads, causal, the logits in the open: `scores` is a site of its own."""

    def __init__(self, width: int, heads: int, qk_norm: bool) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out, self.scores = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False), Scores()
        self.norms = nn.ModuleList(SingleNorm(width // heads) if qk_norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        scores = self.logits = self.scores(self.norms[0](q), self.norms[1](k))
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(hidden, -math.inf).softmax(-1).to(v.dtype) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class SingleNorm(nn.RMSNorm):
    """In fp32 under autocast too: torch warns about an fp16 input to fp32 weights."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


class Scores(nn.Module):
    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return (q / math.sqrt(q.shape[-1])) @ k.transpose(-1, -2)


class Feed(nn.Module):
    """A feed-forward layer; gated ones multiply two activations."""

    def __init__(self, width: int, inner: int, gated: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)
        self.gate = nn.Linear(width, inner, bias=False) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.relu(self.up(x)))


class Layer(nn.Module):
    """Attention and feed-forward on a residual stream, normalised before each or not at all."""

    def __init__(self, width: int, heads: int, *, norm: bool, gated: bool, qk_norm: bool) -> None:
        super().__init__()
        self.attention, self.feed = Attention(width, heads, qk_norm), Feed(width, 2 * width, gated)
        self.norms = nn.ModuleList(nn.RMSNorm(width) if norm else nn.Identity() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.feed(self.norms[1](x))


class Transformer(nn.Module):
    def __init__(
        self,
        vocabulary: int,
        width: int = 32,
        layers: int = 2,
        heads: int = 2,
        *,
        norm: bool = True,
        last_norm: bool = True,
        gated: bool = True,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Layer(width, heads, norm=norm, gated=gated, qk_norm=qk_norm) for _ in range(layers))
        self.norm = nn.RMSNorm(width) if last_norm else nn.Identity()
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
