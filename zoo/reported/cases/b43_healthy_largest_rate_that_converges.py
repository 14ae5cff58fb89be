"""HEALTHY: the largest rate that does not diverge was chosen on purpose: the loss oscillates from batch to batch, and its trend is down.

Source: https://github.com/MahdiHajibabaei/unified-embedding/issues/6
True cause: none
Where: none
Fix: none
"""
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.set_num_threads(1)


class Embedder(nn.Module):
    def __init__(self, speakers=16):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(12, 32, 5, 2, 2), nn.BatchNorm1d(32), nn.ReLU(), nn.Conv1d(32, 32, 5, 2, 2), nn.BatchNorm1d(32), nn.ReLU())
        self.fc = nn.Linear(64, speakers)

    def forward(self, x):
        h = self.conv(x)
        return self.fc(torch.cat([h.mean(-1), h.std(-1)], 1))


def build(fixed=False):
    torch.manual_seed(0)
    model = Embedder()
    opt = torch.optim.SGD(model.parameters(), lr=0.4, momentum=0.9, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, 120)
    voice = torch.randn(16, 12, 1)
    batches = []
    for _ in range(110):
        y = torch.randint(0, 16, (16,))
        batches.append((voice[y] * torch.randn(16, 1, 32).abs() + 0.7 * torch.randn(16, 12, 32), y))
    return dict(model=model, optimizer=opt, scheduler=sched, batches=batches, loss_fn=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
