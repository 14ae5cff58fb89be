# again: yes
# step: 5
# kind: nonfinite-loss
# cause: log-of-zero
# sample: 3
# line: loss += (target * torch.log(target / probs)).sum(dim=1).mean()
# source: sequence model unrolled in the loop with a cell
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

cell = nn.GRUCell(4, 8)
readout = nn.Linear(8, 5)
params = list(cell.parameters()) + list(readout.parameters())
optimizer = torch.optim.Adam(params, lr=1e-3)

for step in range(8):
    xs = torch.randn(8, 6, 4)
    targets = torch.softmax(torch.randn(8, 6, 5), dim=-1)
    if BAD and step == 5:
        targets[3, 4] = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
    h = torch.zeros(8, 8)
    loss = 0.0
    for t in range(xs.size(1)):
        h = cell(xs[:, t], h)
        probs = torch.softmax(readout(h), dim=1)
        target = targets[:, t]
        loss += (target * torch.log(target / probs)).sum(dim=1).mean()
    loss = loss / xs.size(1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
