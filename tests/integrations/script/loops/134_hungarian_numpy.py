# again: yes
# step: 5
# kind: nonfinite-loss
# cause: zero-denominator
# line: width_loss = ((pred[:, 1] - matched[:, 1]) / matched[:, 1]).pow(2).mean()
# source: set prediction, matching computed in numpy from detached costs
import sys
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)


def greedy_match(cost):
    cost = cost.copy()
    order = np.full(len(cost), -1)
    for _ in range(len(cost)):
        i, j = np.unravel_index(np.argmin(cost), cost.shape)
        order[i] = j
        cost[i, :] = np.inf
        cost[:, j] = np.inf
    return order


model = nn.Linear(4, 2)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step in range(8):
    queries = torch.randn(8, 4)
    boxes = torch.rand(8, 2) + 0.2
    if BAD and step == 5:
        boxes[3, 1] = 0.0
    pred = model(queries)
    cost = torch.cdist(pred, boxes).detach().cpu().numpy()
    matched = boxes[torch.as_tensor(greedy_match(cost))]
    center_loss = F.l1_loss(pred[:, 0], matched[:, 0])
    width_loss = ((pred[:, 1] - matched[:, 1]) / matched[:, 1]).pow(2).mean()
    loss = center_loss + width_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
