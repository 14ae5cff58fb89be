# again: yes
# step: 5
# kind: nonfinite-loss
# cause: exp-overflow, outlier-batch
# sample: 3
# line: return (torch.exp(pred) - target * pred).mean()
# source: helper module made at run time, loss_fn(model, batch)
import sys
import types
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

objectives = types.ModuleType("objectives")


def poisson(model, batch):
    x, target = batch
    pred = model(x).squeeze(-1)
    return (torch.exp(pred) - target * pred).mean()


objectives.loss_fn = poisson
sys.modules["objectives"] = objectives
from objectives import loss_fn  # noqa: E402

model = nn.Linear(3, 1)
with torch.no_grad():
    model.weight.fill_(0.3)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(8):
    batch = (torch.randn(8, 3), torch.randint(0, 4, (8,)).float())
    if BAD and step == 5:
        batch[0][3] = 150.0
    loss = loss_fn(model, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
