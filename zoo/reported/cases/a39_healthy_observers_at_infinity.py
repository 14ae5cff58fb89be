"""HEALTHY: quantisation-aware training with observers that are not enabled yet: their buffers min_val = inf and max_val = -inf are the documented start.

Source: https://github.com/pytorch/pytorch/pull/43789 https://github.com/pytorch/pytorch/pull/44956
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


class Observer(nn.Module):
    def __init__(self):
        super().__init__()
        self.enabled = False
        self.register_buffer("min_val", torch.tensor(float("inf")))
        self.register_buffer("max_val", torch.tensor(float("-inf")))

    def forward(self, x):
        if self.enabled:
            self.min_val.copy_(torch.minimum(self.min_val, x.detach().min()))
            self.max_val.copy_(torch.maximum(self.max_val, x.detach().max()))
        return x


def build(fixed=False):
    torch.manual_seed(39)
    model = nn.Sequential(Observer(), nn.Conv1d(4, 16, 5, padding=2), nn.ReLU(), Observer(), nn.Conv1d(16, 16, 5, 2, 2), nn.ReLU(), Observer(), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(16, 3))
    opt = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    batches = []
    for _ in range(60):
        y = torch.randint(0, 3, (12,))
        t = torch.arange(32) / 32 * 6.28
        x = torch.sin(t * (1 + 2 * y[:, None]))[:, None] + 0.3 * torch.randn(12, 4, 32)
        batches.append((x, y))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
