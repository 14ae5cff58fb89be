# again: no
# stops: print(f"step {step}: loss {(loss := criterion(out, y)).item():.4f}")
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 3
# source: loss assigned inside of a print call
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

model = nn.Linear(4, 2)
criterion = nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    x, y = torch.randn(8, 4), torch.randn(8, 2)
    if BAD and step == 5:
        x[3, 1] = float("inf")
    out = model(x)
    print(f"step {step}: loss {(loss := criterion(out, y)).item():.4f}")
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
