"""A text-conditioned decoder in bf16: the padding mask (finfo.min) is added by the encoder and again by the cross-attention, twice the minimum is -inf; for a sample without a caption the whole row is -inf.

Source: https://github.com/NVIDIA-NeMo/Automodel/pull/2658 https://github.com/huggingface/transformers/pull/26421
True cause: two additive masks overflow to -inf
Where: cross (add, softmax)
Fix: one mask
"""
import math

import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


class CrossAttention(nn.Module):
    def __init__(self, dim, once):
        super().__init__()
        self.q, self.kv, self.o, self.once = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim), once

    def forward(self, x, text, bias):
        q, (k, v) = self.q(x), self.kv(text).chunk(2, -1)
        scores = (q @ k.transpose(1, 2)).to(torch.bfloat16) / math.sqrt(q.shape[-1])
        scores = scores + bias
        if not self.once:
            scores = scores + bias
        return self.o(scores.softmax(-1).to(v.dtype) @ v)


class Decoder(nn.Module):
    def __init__(self, once):
        super().__init__()
        self.tok, self.inp, self.cross = nn.Embedding(40, 32, padding_idx=0), nn.Linear(16, 32), CrossAttention(32, once)
        self.norm, self.out = nn.LayerNorm(32), nn.Linear(32, 16)

    def forward(self, patches, ids):
        bias = torch.zeros(ids.shape, dtype=torch.bfloat16).masked_fill(ids == 0, torch.finfo(torch.bfloat16).min)[:, None]
        x = self.inp(patches)
        return self.out(self.norm(x + self.cross(x, self.tok(ids), bias)))


def build(fixed=False):
    torch.manual_seed(32)
    model = Decoder(fixed)
    opt = torch.optim.AdamW(model.parameters(), 2e-3)
    batches = []
    for i in range(40):
        ids = torch.randint(1, 40, (6, 8))
        for r, n in enumerate(torch.randint(2, 9, (6,)).tolist()):
            ids[r, n:] = 0
        if i == 12:
            ids[0] = 0
        clean = torch.randn(6, 9, 16)
        batches.append((clean + 0.5 * torch.randn_like(clean), ids, clean))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: F.mse_loss(m(b[0], b[1]), b[2]), max_grad_norm=1.0)
