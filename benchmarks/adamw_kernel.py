"""AdamW in one Triton kernel that clips and skips by itself, to see how near the bandwidth floor one can get.

torch's fused kernel writes the clipped gradient back: 4 reads and 4 writes an element, 9 units of traffic with the norm's
read. This one does not: 8 units. It is a benchmark, not part of the library; docs/decisions/0003 says why.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _adamw(p_ptr, g_ptr, m_ptr, v_ptr, clip_ptr, skip_ptr, step_ptr, lr, b1, b2, eps, decay, n, BLOCK: tl.constexpr):
    if tl.load(skip_ptr) == 0:
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = i < n
        t = tl.load(step_ptr)
        g = tl.load(g_ptr + i, mask=mask) / tl.load(clip_ptr)
        p = tl.load(p_ptr + i, mask=mask) * (1 - lr * decay)
        m = tl.load(m_ptr + i, mask=mask)
        v = tl.load(v_ptr + i, mask=mask)
        m = m + (g - m) * (1 - b1)
        v = b2 * v + (1 - b2) * g * g
        denominator = tl.sqrt(v / (1 - tl.exp2(t * tl.log2(b2)))) + eps
        p = p - lr / (1 - tl.exp2(t * tl.log2(b1))) * m / denominator
        tl.store(p_ptr + i, p, mask=mask)
        tl.store(m_ptr + i, m, mask=mask)
        tl.store(v_ptr + i, v, mask=mask)


class AdamWKernel:
    def __init__(self, parameters: list[Tensor], lr: float) -> None:
        self.parameters = parameters
        self.m, self.v = ([torch.zeros_like(p) for p in parameters] for _ in range(2))
        self.count = torch.zeros((), device=parameters[0].device)
        self.lr = lr

    @torch.no_grad()
    def step(self, clip: Tensor, skip: Tensor) -> None:
        self.count.add_(1 - skip)
        for p, m, v in zip(self.parameters, self.m, self.v, strict=True):
            n = p.numel()
            _adamw[(triton.cdiv(n, 4096),)](
                p.data, p.grad, m, v, clip, skip, self.count, self.lr, 0.9, 0.999, 1e-8, 0.01, n, BLOCK=4096, num_warps=8
            )
