# again: yes
# step: 5
# kind: nonfinite-loss
# cause: exp-overflow, outlier-batch
# sample: 2
# line: loss = total = (torch.exp(-log_var) * (mu - y) ** 2 + log_var).mean()
# source: heteroscedastic regression with chained assignment
import sys
import torch
import torch.nn as nn

BAD = "bad" in sys.argv
torch.manual_seed(0)


class MuVar(nn.Module):
    def __init__(self):
        super().__init__()
        self.mu = nn.Linear(3, 1)
        self.log_var = nn.Linear(3, 1)
        with torch.no_grad():
            self.log_var.weight.fill_(0.2)

    def forward(self, x):
        return self.mu(x), self.log_var(x)


model = MuVar()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
best = last = float("inf")
for i in range(8):
    x = torch.randn(8, 3)
    y = x.sum(1, keepdim=True)
    if BAD and i == 5:
        x[2] = -200.0
    optimizer.zero_grad()
    mu, log_var = model(x)
    loss = total = (torch.exp(-log_var) * (mu - y) ** 2 + log_var).mean()
    last = best = min(best, total.item())
    loss.backward()
    optimizer.step()
