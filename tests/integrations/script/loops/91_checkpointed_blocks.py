# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 3
# source: activation checkpointing inside of the model
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Dropout(0.1)) for _ in range(3))
        self.out = nn.Linear(6, 1)

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.out(x)


model = Deep()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(8):
    x, y = torch.randn(8, 6), torch.randn(8, 1)
    if BAD and step == 5:
        x[3, 5] = float("nan")
    optimizer.zero_grad()
    pred = model(x)
    loss = F.huber_loss(pred, y, delta=1.5)
    loss.backward()
    optimizer.step()
