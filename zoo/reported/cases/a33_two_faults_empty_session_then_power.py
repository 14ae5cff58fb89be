"""Session recommender: at step 8 a session without clicks is averaged (0 / 0), at step 24 a refunded order gives a negative amount to a fractional power.

Source: https://github.com/alibaba/TorchEasyRec/pull/104 https://github.com/pytorch/pytorch/issues/29518
True cause: division by a count of 0 (step 8), then a fractional power of a negative number (step 24)
Where: pool (div), then spend (pow)
Fix: clamp(min=1); clamp the amount
"""
import torch
import torch.nn.functional as F
from torch import nn

torch.set_num_threads(1)


class MeanPool(nn.Module):
    def __init__(self, safe):
        super().__init__()
        self.safe = safe

    def forward(self, h, mask):
        n = mask.sum(1, keepdim=True)
        return (h * mask[..., None]).sum(1) / (n.clamp(min=1) if self.safe else n)


class Spend(nn.Module):
    def __init__(self, safe):
        super().__init__()
        self.safe, self.lin = safe, nn.Linear(3, 16)

    def forward(self, amount):
        return self.lin((amount.clamp(min=0.0) if self.safe else amount).pow(0.3))


class Recommender(nn.Module):
    def __init__(self, safe):
        super().__init__()
        self.item, self.pool, self.spend = nn.Embedding(40, 16), MeanPool(safe), Spend(safe)
        self.out = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, b):
        return self.out(torch.cat([self.pool(self.item(b["items"]), b["mask"]), self.spend(b["amount"])], -1)).squeeze(-1)


def build(fixed=False):
    torch.manual_seed(33)
    model = Recommender(fixed)
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    batches = []
    for i in range(45):
        items = torch.randint(0, 40, (12, 6))
        mask = (torch.arange(6) < torch.randint(1, 7, (12, 1))).float()
        amount = 0.1 + 5 * torch.rand(12, 3)
        y = (amount[:, 0] > 2.5).float()
        if i == 8:
            mask[2] = 0
        if i == 24:
            amount[1, 2] = -3.0
        batches.append(dict(items=items, mask=mask, amount=amount, y=y))
    return dict(model=model, optimizer=opt, batches=batches, loss_fn=lambda m, b: F.binary_cross_entropy_with_logits(m(b), b["y"]), max_grad_norm=1.0)
