# again: yes
# step: 5
# kind: nonfinite-loss
# cause: nonfinite-batch
# sample: 5
# source: negative samples drawn with np.random after the forward
import sys
import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)
np.random.seed(0)

user_net = nn.Linear(4, 6)
items = nn.Embedding(20, 6)
optimizer = torch.optim.Adam([*user_net.parameters(), *items.parameters()], lr=1e-3)
for step in range(8):
    users = torch.randn(8, 4)
    pos = torch.randint(0, 20, (8,))
    rating = torch.rand(8)
    if BAD and step == 5:
        rating[5] = float("nan")
    u = user_net(users)
    neg = torch.from_numpy(np.random.randint(0, 20, size=8))
    margin = (u * items(pos)).sum(1) - (u * items(neg)).sum(1)
    loss = (rating * F.softplus(-margin)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
