# again: no
# stops: with optimizing(optimizer) as step_info:
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 0
# source: context manager that clears gradients and steps the optimizer on exit
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)


class optimizing:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __enter__(self):
        self.optimizer.zero_grad()
        return self

    def __exit__(self, *exc):
        if exc[0] is None:
            self.optimizer.step()


model = nn.Linear(4, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for i in range(8):
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    if BAD and i == 5:
        y[0] = float("nan")
    with optimizing(optimizer) as step_info:
        out = model(x)
        loss = nn.functional.mse_loss(out, y)
        loss.backward()
