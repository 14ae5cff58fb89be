"""MMDiT: a transformer with two streams, text and latent, that attend to each other.

Each stream has weights of its own; in every block their queries, keys and values are joined for one attention. Both are modulated
by both timesteps (AdaLN), and queries and keys are normalised, so that logits of the attention cannot grow without end. What is
predicted begins at zero.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from nanproof_recipes.latent_dlm.config import Model
from nanproof_recipes.latent_dlm.data.corpus import IDS, OUT

FREQUENCIES = 256
"""Numbers that a timestep is spelled out with."""


class Timestep(nn.Module):
    """A number from 0 (clean) to 1 (nothing but noise) as a vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(FREQUENCIES, width), nn.Linear(width, width)

    def forward(self, t: Tensor) -> Tensor:
        rates = torch.exp(torch.arange(FREQUENCIES // 2, device=t.device) * (-math.log(10_000) / (FREQUENCIES // 2)))
        angles = 1000 * t[:, None].float() * rates
        waves = torch.cat((angles.cos(), angles.sin()), -1).to(self.inner.weight.dtype)
        made: Tensor = self.outer(nn.functional.silu(self.inner(waves)))
        return made


class Rms(nn.RMSNorm):
    """At a root mean square of 1, times a learned scale; computed in fp32 whatever it comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.float(), list(self.normalized_shape), self.weight.float(), self.eps).to(x.dtype)


class Stream(nn.Module):
    """What one of the two streams has in a block."""

    def __init__(self, width: int, heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width, elementwise_affine=False)
        self.before_mlp = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation = nn.Linear(width, 6 * width)
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm, self.k_norm = Rms(width // heads, eps=1e-6), Rms(width // heads, eps=1e-6)
        self.out = nn.Linear(width, width)
        hidden = int(width * mlp_ratio)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, width))

    def modulated_by(self, condition: Tensor) -> tuple[Tensor, ...]:
        made: Tensor = self.modulation(condition)
        return made[:, None].chunk(6, -1)

    def queries(self, x: Tensor, by: tuple[Tensor, ...], turn: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [batch, heads, tokens, width of a head]; the first two turned by their positions."""
        q, k, v = self.qkv(modulate(self.before_attention(x), by[0], by[1])).unflatten(-1, (3, self.heads, -1)).unbind(2)
        return rotated(self.q_norm(q).transpose(1, 2), turn), rotated(self.k_norm(k).transpose(1, 2), turn), v.transpose(1, 2)

    def finish(self, x: Tensor, attended: Tensor, by: tuple[Tensor, ...]) -> Tensor:
        x = x + by[2] * self.out(attended.transpose(1, 2).flatten(2))
        made: Tensor = self.mlp(modulate(self.before_mlp(x), by[3], by[4]))
        return x + by[5] * made


class Block(nn.Module):
    """Two streams and one attention over both."""

    def __init__(self, width: int, heads: int, mlp_ratio: float) -> None:
        super().__init__()
        self.text, self.latent = Stream(width, heads, mlp_ratio), Stream(width, heads, mlp_ratio)

    def forward(
        self, text: Tensor, latent: Tensor, condition: Tensor, turns: tuple[Tensor, Tensor], mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        by_text, by_latent = self.text.modulated_by(condition), self.latent.modulated_by(condition)
        own = self.text.queries(text, by_text, turns[0])
        others = self.latent.queries(latent, by_latent, turns[1])
        q, k, v = (torch.cat(pair, 2) for pair in zip(own, others, strict=True))
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        to_text, to_latent = attended.split((text.shape[1], latent.shape[1]), 2)
        return self.text.finish(text, to_text, by_text), self.latent.finish(latent, to_latent, by_latent)


class Head(nn.Module):
    """From a stream to what is predicted of it; zero at first."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.modulation, self.out = nn.Linear(width, 2 * width), nn.Linear(width, out)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        made: Tensor = self.out(modulate(self.norm(x), *self.modulation(condition)[:, None].chunk(2, -1)))
        return made


class MMDiT(nn.Module):
    """Predicts the masked bytes of a text and the noise (or v, or x0) of its latent, each with the other in sight."""

    def __init__(self, shape: Model) -> None:
        super().__init__()
        self.shape = shape
        width = shape.width
        self.bytes = nn.Embedding(IDS, width)
        self.latent_norm, self.latent_in = Rms(shape.latent_width, eps=1e-6), nn.Linear(shape.latent_width, width)
        self.text_time, self.latent_time = Timestep(width), Timestep(width)
        self.blocks = nn.ModuleList(Block(width, shape.heads, shape.mlp_ratio) for _ in range(shape.layers))
        self.text_out, self.latent_out = Head(width, OUT), Head(width, shape.latent_width)
        self.latent_skip = nn.Linear(shape.latent_width, shape.latent_width, bias=False)
        # A latent stands for a stretch of the text, and has the position of its middle.
        stretch = shape.text_length / shape.latent_length
        places = {"text": torch.arange(shape.text_length), "latent": stretch * (torch.arange(shape.latent_length) + 0.5) - 0.5}
        for name, place in places.items():
            self.register_buffer(f"{name}_turn", turned(place.float(), width // shape.heads), persistent=False)
        self.text_turn: Tensor
        self.latent_turn: Tensor
        self.initialise()

    def initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.bytes.weight, std=0.02)
        for module in self.modules():
            if isinstance(module, (Stream, Head)):
                nn.init.zeros_(module.modulation.weight)
            if isinstance(module, Head):
                nn.init.zeros_(module.out.weight)
        nn.init.zeros_(self.latent_skip.weight)

    def forward(
        self, ids: Tensor, latent: Tensor, text_time: Tensor, latent_time: Tensor, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits [batch, tokens, OUT] and a prediction of the latent's shape.

        Args:
            ids: bytes, END, MASK and PAD, [batch, tokens].
            latent: as noisy as `latent_time` says, [batch, latents, width of a latent].
            text_time, latent_time: 0 where it is clean, to 1; [batch].
            keep: False where there is padding; None where there is none.
        """
        condition = nn.functional.silu(self.text_time(text_time) + self.latent_time(latent_time))
        latent = latent.to(self.latent_in.weight.dtype)
        text = self.bytes(ids)
        other = self.latent_in(self.latent_norm(latent)).to(text.dtype)  # under autocast too, both streams add up in fp32
        mask = None
        if keep is not None:
            mask = torch.cat((keep, keep.new_ones(latent.shape[:2])), 1)[:, None, None]
        turns = self.text_turn, self.latent_turn
        for block in self.blocks:
            text, other = block(text, other, condition, turns, mask)
        # Of a latent that is nearly all noise, the noise is nearly the latent itself: a way around the blocks carries that, and
        # how large it is, which the blocks are not shown.
        return self.text_out(text, condition), self.latent_out(other, condition) + self.latent_skip(latent)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale) + shift


def turned(place: Tensor, width: int) -> Tensor:
    """Cosines and sines of the angles by which a position turns pairs of numbers (RoPE), [2, tokens, width / 2]."""
    angles = place[:, None] / 10_000 ** (torch.arange(width // 2) / (width // 2))
    return torch.stack((angles.cos(), angles.sin()))


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    cos, sin = turn.to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def count(model: nn.Module) -> int:
    """Parameters of a model."""
    return sum(p.numel() for p in model.parameters())


def sharded(model: MMDiT, **options: Any) -> MMDiT:
    """Split over the ranks, block by block (FSDP2)."""
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    return model
