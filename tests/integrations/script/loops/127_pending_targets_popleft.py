# again: no
# stops: y = pending.popleft()
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 2
# source: delayed labels taken from a queue after the prediction
import sys
from collections import deque
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)

model = nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
stream = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(8)]
if BAD:
    stream[5][0][2, 0] = float("nan")
pending = deque()
for x, label in stream:
    pending.append(label)
    pred = model(x)
    y = pending.popleft()
    loss = F.mse_loss(pred, y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
