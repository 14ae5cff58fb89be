# again: no
# stops: loss = next(loss_stream)
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 4
# source: long-lived generator that computes losses, consumed with next
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)


def stream(model):
    step = 0
    while True:
        x = torch.randn(8, 3)
        y = x.prod(1, keepdim=True)
        if BAD and step == 5:
            x[4, 1] = float("nan")
        yield F.mse_loss(model(x), y)
        step += 1


model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
loss_stream = stream(model)
for _ in range(8):
    loss = next(loss_stream)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
