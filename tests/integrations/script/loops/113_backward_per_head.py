# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 0
# source: one backward per task, one optimizer step for all
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

tasks = ["depth", "normal", "edge"]
trunk = nn.Linear(5, 8)
heads = nn.ModuleDict({t: nn.Linear(8, 1) for t in tasks})
criteria = {"depth": nn.L1Loss(), "normal": nn.MSELoss(), "edge": nn.BCEWithLogitsLoss()}
optimizer = torch.optim.Adam([*trunk.parameters(), *heads.parameters()], lr=1e-3)
for step in range(8):
    x = torch.randn(8, 5)
    y = {t: torch.rand(8, 1) for t in tasks}
    if BAD and step == 5:
        y["normal"][0] = float("nan")
    optimizer.zero_grad()
    for task in tasks:
        h = torch.relu(trunk(x))
        loss = criteria[task](heads[task](h), y[task])
        loss.backward()
    optimizer.step()
