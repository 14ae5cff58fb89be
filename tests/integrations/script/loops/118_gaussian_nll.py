# again: yes
# step: 5
# kind: nonfinite-loss
# cause: log-of-zero, zero-denominator, outlier-batch
# sample: 1
# line: nll = 0.5 * (torch.log(var) + (y - mu) ** 2 / var)
# source: probabilistic regression with a softplus variance
import sys
import torch
import torch.nn as nn
import torch.nn.functional as F

BAD = "bad" in sys.argv
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.mu, self.raw = nn.Linear(3, 1), nn.Linear(3, 1)
        with torch.no_grad():
            self.raw.weight.fill_(0.2)

    def forward(self, x):
        return self.mu(x), F.softplus(self.raw(x))


def train_epoch(model, opt, loader):
    for x, y in loader:
        mu, var = model(x)
        nll = 0.5 * (torch.log(var) + (y - mu) ** 2 / var)
        loss = nll.mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


model = Net()
loader = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(8)]
if BAD:
    loader[5][0][1] = -400.0
train_epoch(model, torch.optim.Adam(model.parameters(), lr=1e-3), loader)
