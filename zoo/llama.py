"""A plain Llama in torch alone. The one in transformers makes the host wait once a step while it builds its mask, which would
hide what a guard adds or does not add."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, kv_heads: int, intermediate: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, hidden // heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.q = nn.Linear(hidden, hidden, bias=False)
        self.k, self.v = (nn.Linear(hidden, kv_heads * self.size, bias=False) for _ in range(2))
        self.o = nn.Linear(hidden, hidden, bias=False)
        self.gate, self.up = (nn.Linear(hidden, intermediate, bias=False) for _ in range(2))
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, hidden = x.shape
        h = self.attention_norm(x)
        q = rotate(self.q(h).view(batch, length, self.heads, self.size).transpose(1, 2), cos, sin)
        k = rotate(self.k(h).view(batch, length, self.kv_heads, self.size).transpose(1, 2), cos, sin)
        v = self.v(h).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        x = x + self.o(a.transpose(1, 2).reshape(batch, length, hidden))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, left * sin + right * cos), dim=-1).to(x.dtype)


class Llama(nn.Module):
    def __init__(
        self, *, hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int, length: int
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads, kv_heads, intermediate) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        size = hidden // heads
        angle = torch.outer(torch.arange(length), 10000.0 ** (-torch.arange(0, size, 2) / size))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x, length = self.embed(tokens), tokens.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return self.head(self.norm(x))


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits = model(tokens)[:, :-1].float()
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


def llama(device: str) -> tuple[Llama, Tensor]:
    """A small one and a batch for it: 271 M parameters on CUDA, 7 M on a CPU."""
    torch.manual_seed(0)
    if device == "cuda":
        model = Llama(hidden=1024, layers=16, heads=16, kv_heads=16, intermediate=2816, vocab=32000, length=1024).cuda()
        return model, torch.randint(0, 32000, (8, 1024), device="cuda")
    model = Llama(hidden=256, layers=8, heads=8, kv_heads=8, intermediate=688, vocab=1000, length=128)
    return model, torch.randint(0, 1000, (8, 128))
