# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 0
# source: memory saving, names set to None between loss and backward
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(8):
    x = torch.randn(8, 6)
    y = torch.randint(0, 2, (8,))
    if BAD and step == 5:
        x[0, 0] = float("nan")
    out = model(x)
    loss = criterion(out, y)
    x = None
    out = None
    for p in model.parameters():
        p.grad = None
    loss.backward()
    optimizer.step()
