# again: yes
# step: 5
# kind: nonfinite-loss
# cause: log-of-zero
# sample: 2
# line: losses = [(t * (torch.log(t) - torch.log(p))).sum() for p, t in zip(probs, targets)]
# source: soft-target training with a list comprehension and torch.stack
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

model = nn.Linear(4, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
for step in range(8):
    x = torch.randn(8, 4)
    targets = torch.softmax(torch.randn(8, 3), 1)
    if BAD and step == 5:
        targets[2] = torch.tensor([1.0, 0.0, 0.0])
    probs = torch.softmax(model(x), dim=1)
    losses = [(t * (torch.log(t) - torch.log(p))).sum() for p, t in zip(probs, targets)]
    optimizer.zero_grad()
    torch.stack(losses).mean().backward()
    optimizer.step()
