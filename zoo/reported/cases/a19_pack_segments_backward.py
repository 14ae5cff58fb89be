"""A hand-written pack_segments (ragged to padded): the backward allocates the gradient with empty() and writes only the first max_length rows of each segment. NaN here stands for what lies in that memory.

Source: https://github.com/pytorch/FBGEMM/pull/5754
True cause: part of the gradient that a custom Function returns is never written
Where: pack (PackSegments.backward)
Fix: zeros instead of empty
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


class PackSegments(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t, lengths, max_length, zero):
        ctx.lengths, ctx.max_length, ctx.zero, ctx.rows = lengths, max_length, zero, len(t)
        out, start = t.new_zeros(len(lengths), max_length, t.shape[1]), 0
        for r, n in enumerate(lengths):
            k = min(n, max_length)
            out[r, :k] = t[start : start + k]
            start += n
        return out

    @staticmethod
    def backward(ctx, grad):
        shape = (ctx.rows, grad.shape[-1])
        g = grad.new_zeros(shape) if ctx.zero else grad.new_empty(shape).fill_(float("nan"))
        start = 0
        for r, n in enumerate(ctx.lengths):
            k = min(n, ctx.max_length)
            g[start : start + k] = grad[r, :k]
            start += n
        return g, None, None, None


class Pack(nn.Module):
    def __init__(self, max_length, zero):
        super().__init__()
        self.max_length, self.zero = max_length, zero

    def forward(self, t, lengths):
        return PackSegments.apply(t, lengths, self.max_length, self.zero)


class SessionModel(nn.Module):
    def __init__(self, zero):
        super().__init__()
        self.item, self.proj, self.pack = nn.Embedding(50, 16), nn.Sequential(nn.Linear(16, 24), nn.LayerNorm(24)), Pack(10, zero)
        self.rnn, self.out = nn.GRU(24, 24, batch_first=True), nn.Linear(24, 50)

    def forward(self, flat, lengths):
        x = self.pack(self.proj(self.item(flat)), lengths)
        return self.out(self.rnn(x)[0].mean(1))


def build(fixed=False):
    torch.manual_seed(19)
    model = SessionModel(zero=fixed)
    opt = torch.optim.Adam(model.parameters(), 5e-3)
    batches = []
    for i in range(50):
        lengths = torch.randint(2, 11, (6,)).tolist()
        if i == 8:
            lengths[2] = 15
        y = torch.randint(0, 50, (6,))
        flat = torch.cat([(int(c) + torch.randint(0, 2, (n,))) % 50 for c, n in zip(y, lengths)])
        batches.append((flat, lengths, y))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: F.cross_entropy(m(b[0], b[1]), b[2]), max_grad_norm=1.0)
