# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 3
# source: compact modern script with assignment expressions
import sys
import torch
from torch import nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 2))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
data = iter([(torch.randn(8, 4), torch.randint(0, 2, (8,))) for _ in range(8)])

step = 0
while (batch := next(data, None)) is not None:
    x, y = batch
    if BAD and step == 5:
        x[3, 3] = float("nan")
    optimizer.zero_grad()
    (loss := criterion((out := model(x)), y)).backward()
    acc = (out.argmax(1) == y).float().mean()
    optimizer.step()
    step += 1
