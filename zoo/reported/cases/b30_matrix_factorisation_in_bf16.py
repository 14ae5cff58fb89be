"""Matrix factorisation cast to bf16 as a whole (weights too): at a rate of 2e-4 nearly every update is smaller than half a bf16 step of the weight and is rounded away.

Source: https://github.com/workofart/ml-by-hand/pull/85 https://github.com/vllm-project/speculators/pull/765 https://github.com/hp-l33/AiM/issues/10
True cause: updates round away in bf16 weights
Where: users, items (weights in bf16)
Fix: fp32 weights (autocast), or stochastic rounding
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


class MF(nn.Module):
    def __init__(self, n_users, n_items, dim):
        super().__init__()
        self.users = nn.Embedding(n_users, dim)
        self.items = nn.Embedding(n_items, dim)

    def forward(self, u, i):
        return (self.users(u) * self.items(i)).sum(-1) / 4


def build(fixed=False):
    torch.manual_seed(0)
    model = MF(16, 16, 512)
    if not fixed:
        model = model.to(torch.bfloat16)
    opt = torch.optim.AdamW(model.parameters(), lr=2e-4, weight_decay=0.0)
    taste = torch.randn(16, 4) @ torch.randn(4, 16)
    batches = []
    for _ in range(110):
        u, i = torch.cartesian_prod(torch.arange(16), torch.arange(16))[torch.randperm(256)[:224]].unbind(1)
        batches.append((u, i, (taste[u, i] > 0).float()))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: F.binary_cross_entropy_with_logits(m(b[0], b[1]).float(), b[2]))
