# again: yes
# step: 5
# kind: nonfinite-loss
# cause: exp-overflow, outlier-batch
# sample: 4
# line: loss = (torch.exp(log_rate) - counts * log_rate).mean()
# source: count regression under autocast
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)

model = nn.Linear(4, 1)
with torch.no_grad():
    model.weight.fill_(0.1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

for step in range(8):
    x = torch.rand(8, 4)
    counts = torch.randint(0, 5, (8,)).float()
    if BAD and step == 5:
        x[4] = 500.0
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        log_rate = model(x).squeeze(1)
        log_rate = log_rate.float()
        loss = (torch.exp(log_rate) - counts * log_rate).mean()
    loss.backward()
    optimizer.step()
