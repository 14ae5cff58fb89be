# again: yes
# step: 5
# kind: nonfinite-loss
# cause: zero-denominator
# sample: 6
# line: loss = ((out - y).abs() / (out.abs() + y.abs())).mean()
# source: loss chosen by a match statement on the config
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
config = {"loss": "smape", "lr": 0.01}

model = nn.Linear(4, 1, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
for step in range(8):
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    if BAD and step == 5:
        x[6], y[6] = 0.0, 0.0
    out = model(x)
    match config["loss"]:
        case "mse":
            loss = F.mse_loss(out, y)
        case "smape":
            loss = ((out - y).abs() / (out.abs() + y.abs())).mean()
        case _:
            raise ValueError(config["loss"])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
