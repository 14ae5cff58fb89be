"""A small GPT trained in a plain loop that knows nothing of nanproof.

python examples/plain_loop.py                                     trains
nanproof run examples/plain_loop.py                               trains to the same weights, protected
python examples/plain_loop.py --bad-step 20                       one NaN in one batch: every weight is NaN at the end
nanproof run examples/plain_loop.py --bad-step 20                 the step is refused and explained
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY, WIDTH, LENGTH = 32, 16, 16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor, targets: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        h = self.tokens(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.norm(h))
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view(targets.shape)
        return logits, (losses.mean(dim=1) * weights).mean()


def get_batch(bad: bool) -> tuple[Tensor, Tensor, Tensor]:
    start = torch.randint(0, VOCABULARY, (4, 1))
    rows = (start + torch.arange(LENGTH + 1)) % VOCABULARY
    weights = torch.ones(4)
    if bad:
        weights[2] = math.nan  # a sample whose weight was computed as 0/0
    return rows[:, :-1], rows[:, 1:], weights


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--bad-step", type=int, default=-1)
    parser.add_argument("--out", default="")
    args = parser.parse_args()

    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(args.steps):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        for micro_step in range(2):
            x, targets, weights = get_batch(step == args.bad_step and micro_step == 1)
            _, loss = model(x, targets, weights)
            (loss / 2).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 9 or step == args.bad_step:
            print(f"step {step}: loss {loss.item():.4f}, gradient norm {norm.item():.4f}")
    if args.out:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "args": vars(args)}, args.out)


if __name__ == "__main__":
    main()
